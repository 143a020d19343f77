// Products of weights with one row of x: weights are multiplied as they are unpacked, in registers.
#pragma once

#include "unpack.h"

namespace ds {
namespace inference {
namespace {

// Rows of bf16 are read so many at a time; what is left of a row, in its order.
constexpr long STEP = 4 * W;

// What `one_row` reads in the place of x: for 4 bits and bf16 even places of each 2 W before odd ones; then sums of groups.
inline bool rearranges(const Weight& w) { return w.form == INT4 || w.form == BF16 || w.lows; }

inline const float* rearranged(const Weight& w, const float* x, float* to) {
    if (!rearranges(w)) return x;
    const long apart = w.form == INT4 ? w.in : w.form == BF16 ? w.in / STEP * STEP : 0;
    for (long i = 0; i < apart; i += 2 * W) unzip(x + i, to + i, to + i + W);
    memcpy(to + apart, x + apart, (size_t)(w.in - apart) * 4);
    return to;
}

inline void sum_groups(const Weight& w, const float* x, float* to) {
    for (long g = 0; g < w.in / w.group; g++) {
        F sum = {};
        for (long i = 0; i < w.group; i += W) sum += load(x + g * w.group + i);
        to[g] = total(sum);
    }
}

// [Note: order] One row of weights after the other is the order of memory, which the processor's own prefetching follows.
// What it leaves is asked for AHEAD, in bytes: where that was measured to be faster.
constexpr long AHEAD = 6144, AHEAD_F32 = 4096;

// Products of a row of weights with x, to be added across lanes. bf16: with x `rearranged`.
template <int T>
inline F one_plain(const char* row, const float* x, long n) {
    const auto from = (const typename Of<T>::element*)row;
    F s[4] = {};
    long i = 0;
    for (; i + STEP <= n; i += STEP) {
        if constexpr (T == BF16) {
            F even, odd;
            for (int k = 0; k < 4; k += 2) {
                load_pairs(from + i + k * W, even, odd);
                s[k] = fma(even, load(x + i + k * W), s[k]);
                s[k + 1] = fma(odd, load(x + i + k * W + W), s[k + 1]);
            }
        } else {
            for (long k = 0; T == F32 && k < 4 * STEP; k += 64) __builtin_prefetch(row + 4 * i + k + AHEAD_F32, 0, 2);
            for (int k = 0; k < 4; k++) s[k] = fma(Of<T>::get(from + i + k * W), load(x + i + k * W), s[k]);
        }
    }
    each(n - i, [&](long k, long m) { s[0] = fma(get_some<T>(from + i + k, m), part(x + i + k, m), s[0]); });
    return (s[0] + s[1]) + (s[2] + s[3]);
}

// GROUP: the size of groups, or 0 when it is not known here.
template <bool FOUR, int GROUP>
inline F4 one_quantized(
    const Weight& w, const long* places, const float* x, long from, const float* scales, const float* lows) {
    const long group = GROUP ? GROUP : w.group, groups = w.in / group;
    const char* rows[J];
    const float* scales_of[J];
    F s[J] = {};
    for (int k = 0; k < J; k++) {
        rows[k] = line(w, places[k]);
        scales_of[k] = scales + (places[k] - from) * groups;
        if (lows) {
            const float *sums = x + whole(w.in), *low = lows + (places[k] - from) * groups;
            each(groups, [&](long g, long m) { s[k] = fma(part(low + g, m), part(sums + g, m), s[k]); });
        }
    }
    const Nibbles nibbles(!w.lows);
    const char* soon = rows[0] + AHEAD;
    for (long g = 0; g < groups; g++, x += group) {
        F sums[J] = {};
        prefetch(soon, J * group / (FOUR ? 2 : 1));
        soon += J * group / (FOUR ? 2 : 1);
        if (FOUR) {
            for (long i = 0; i < group; i += 2 * W) {
                const F v = load(x + i), u = load(x + i + W);
                for (int k = 0; k < J; k++) {
                    F even, odd;
                    nibbles.get(rows[k] + i / 2, even, odd);
                    sums[k] = fma(even, v, fma(odd, u, sums[k]));
                }
            }
        } else {
            for (long i = 0; i < group; i += W) {
                const F v = load(x + i);
                for (int k = 0; k < J; k++) sums[k] = fma(eight(rows[k] + i, lows), v, sums[k]);
            }
        }
        for (int k = 0; k < J; k++) {
            s[k] = fma(sums[k], set(scales_of[k][g]), s[k]);
            rows[k] += FOUR ? group / 2 : group;
        }
    }
    return totals(s[0], s[1], s[2], s[3]);
}

// scales, lows: of the rows from `from` on, in fp32.
inline F4 one_row(const Weight& w, const long* places, const float* x, long from, const float* scales, const float* lows) {
    if (w.form == INT8 && w.group == 32) return one_quantized<false, 32>(w, places, x, from, scales, lows);
    if (w.form == INT4 && w.group == 32) return one_quantized<true, 32>(w, places, x, from, scales, lows);
    if (w.form == INT8 && w.group == 64) return one_quantized<false, 64>(w, places, x, from, scales, lows);
    if (w.form == INT8) return one_quantized<false, 0>(w, places, x, from, scales, lows);
    if (w.form == INT4) return one_quantized<true, 0>(w, places, x, from, scales, lows);
    F s[J];
    for (int k = 0; k < J; k++) {
        const char* row = line(w, places[k]);
        s[k] = w.form == F32    ? one_plain<F32>(row, x, w.in)
               : w.form == BF16 ? one_plain<BF16>(row, x, w.in)
                                : one_plain<F16>(row, x, w.in);
    }
    return totals(s[0], s[1], s[2], s[3]);
}

}  // namespace
}  // namespace inference
}  // namespace ds
