// y = x @ w.T for a few rows x, reading each weight once from memory.
//
// [Note: one row and several] One row is multiplied as weights are unpacked, in registers. For several, four rows of
// weights are unpacked into the first-level cache, and each vector of them is multiplied with up to TILE rows of x.

#if defined(DS_AVX512)
constexpr int TILE = 6;  // 24 sums, 4 weights and an x in 32 registers
#else
constexpr int TILE = 2;
#endif
constexpr int J = 4;  // rows of weights side by side

inline long whole(long n) { return (n + 2 * W - 1) / (2 * W) * (2 * W); }

inline I bytes(const uint8_t* from) {
#if defined(DS_AVX512)
    return (I)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from));
#elif defined(DS_AVX2)
    return (I)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from));
#else
    I x;
    for (int i = 0; i < W; i++) x[i] = from[i];
    return x;
#endif
}

inline F signed_bytes(const char* from) {
#if defined(DS_AVX512)
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)));
#elif defined(DS_AVX2)
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)));
#else
    F x;
    for (int i = 0; i < W; i++) x[i] = (float)(int8_t)from[i];
    return x;
#endif
}

// W numbers of 8 bits; they have no sign where there are lows.
inline F eight(const char* from, bool lows) {
    return lows ? __builtin_convertvector(bytes((const uint8_t*)from), F) : signed_bytes(from);
}

// The 2 W numbers in W bytes: those in low halves, those in high halves. `lines`: what 0 .. 15 stand for.
struct Nibbles {
    F lines;
    bool is_signed;

    explicit Nibbles(bool is_signed_) : is_signed(is_signed_) {
        for (int i = 0; i < W; i++) lines[i] = (float)(is_signed && i > 7 ? i - 16 : i);
    }

    inline void get(const char* from, F& low, F& high) const {
        const I x = bytes((const uint8_t*)from);
#if defined(DS_AVX512)
        low = _mm512_permutexvar_ps((__m512i)x, lines);  // looks at the lowest four bits only
        high = _mm512_permutexvar_ps((__m512i)(x >> 4), lines);
#else
        const I bias = I{} + (is_signed ? 8 : 0);
        low = __builtin_convertvector(((x & 15) ^ bias) - bias, F);
        high = __builtin_convertvector(((x >> 4) ^ bias) - bias, F);
#endif
    }
};

// Interleaved: even[0], odd[0], even[1] ...
inline void zip(F even, F odd, F& first, F& second) {
#if defined(DS_AVX512)
    const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    first = _mm512_permutex2var_ps(even, low, odd);
    second = _mm512_permutex2var_ps(even, _mm512_add_epi32(low, _mm512_set1_epi32(8)), odd);
#else
    for (int i = 0; i < W; i++) {
        const F& from = i & 1 ? odd : even;
        first[i] = from[i / 2];
        second[i] = from[W / 2 + i / 2];
    }
#endif
}

// The opposite: those at even and at odd places of 2 W.
inline void unzip(const float* from, float* even, float* odd) {
#if defined(DS_AVX512)
    const __m512i places = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const F first = load(from), second = load(from + W);
    store(even, _mm512_permutex2var_ps(first, places, second));
    store(odd, _mm512_permutex2var_ps(first, _mm512_add_epi32(places, _mm512_set1_epi32(1)), second));
#else
    for (int i = 0; i < W; i++) {
        even[i] = from[2 * i];
        odd[i] = from[2 * i + 1];
    }
#endif
}

inline long size_of(int form) { return form == F32 ? 4 : 2; }

inline const char* line(const Weight& w, long j) {
    if (w.form == INT8) return w.data + j * w.in;
    if (w.form == INT4) return w.data + j * (w.in / 2);
    return w.data + j * w.stride * size_of(w.form);
}

inline bool is_direct(const Weight& w) {
    return w.form == INT8 ? w.group % W == 0 : w.form != INT4 || w.group % (2 * W) == 0;
}

// put(i, x): W numbers of a row of quantised weights that is direct; with `apart`, of each 2 W of 4 bits those at even
// places first.
template <class Put>
inline void unpack(const Weight& w, const char* from, const float* scales, const float* lows, bool apart, Put put) {
    const Nibbles nibbles(!w.lows);
    for (long i = 0, g = 0; i < w.in; g++) {
        const F scale = set(scales[g]), low = lows ? set(lows[g]) : F{};
        if (w.form == INT4) {
            for (const long end = i + w.group; i < end; i += 2 * W, from += W) {
                F even, odd;
                nibbles.get(from, even, odd);
                even = fma(even, scale, low);
                odd = fma(odd, scale, low);
                if (!apart) zip(even, odd, even, odd);
                put(i, even);
                put(i + W, odd);
            }
        } else {
            for (const long end = i + w.group; i < end; i += W, from += W) put(i, fma(eight(from, lows), scale, low));
        }
    }
}

// Row j of `w` in fp32. room: for its scales and lows.
inline void widen_row(const Weight& w, long j, float* to, float* room) {
    const char* from = line(w, j);
    if (w.form == F32) {
        memcpy(to, from, (size_t)w.in * 4);
        return;
    }
    if (w.form == BF16 || w.form == F16) return widen(to, from, w.form, w.in);
    const long groups = w.in / w.group;
    float *scales = room, *lows = w.lows ? room + groups : nullptr;
    widen_as<F16>(scales, w.scales + j * groups, groups);
    if (lows) widen_as<F16>(lows, w.lows + j * groups, groups);
    if (is_direct(w)) return unpack(w, from, scales, lows, false, [&](long i, F x) { store(to + i, x); });
    for (long i = 0; i < w.in; i++) {
        const int byte = w.form == INT8 ? lows ? (uint8_t)from[i] : (int8_t)from[i] : i & 1 ? (uint8_t)from[i / 2] >> 4 : from[i / 2] & 15;
        const int q = w.form == INT4 && !w.lows && byte > 7 ? byte - 16 : byte;
        to[i] = (float)q * scales[i / w.group] + (lows ? lows[i / w.group] : 0);
    }
}

// -- one row --------------------------------------------------------------------------------------------------------

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

inline void prefetch(const char* at, long size) {
    for (long i = 0; i < size; i += 64) __builtin_prefetch(at + i);
}

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

// -- several rows ---------------------------------------------------------------------------------------------------

template <int R>
inline void tile(const float* const* rows, const float* const* x, long n, F4* sums) {
    F s[R][J] = {};
    const auto step = [&](long i, auto get) __attribute__((always_inline)) {
        F v[J];
        for (int k = 0; k < J; k++) v[k] = get(rows[k] + i);
        for (int r = 0; r < R; r++) {
            const F u = get(x[r] + i);
            for (int k = 0; k < J; k++) s[r][k] = fma(v[k], u, s[r][k]);
        }
    };
    long i = 0;
    for (; i + W <= n; i += W) step(i, [](const float* p) { return load(p); });
    if (i < n) step(i, [m = n - i](const float* p) { return part(p, m); });
    for (int r = 0; r < R; r++) sums[r] = totals(s[r][0], s[r][1], s[r][2], s[r][3]);
}

#if defined(DS_BF16)
// In bf16, a vector of which has 2 W elements.
template <int R>
inline void tile(const uint16_t* const* rows, const uint16_t* const* x, long n, F4* sums) {
    F s[R][J] = {};
    const auto step = [&](long i, auto get) __attribute__((always_inline)) {
        __m512bh v[J];
        for (int k = 0; k < J; k++) v[k] = get(rows[k] + i);
        for (int r = 0; r < R; r++) {
            const __m512bh u = get(x[r] + i);
            for (int k = 0; k < J; k++) s[r][k] = _mm512_dpbf16_ps(s[r][k], v[k], u);
        }
    };
    long i = 0;
    for (; i + 2 * W <= n; i += 2 * W) step(i, [](const uint16_t* p) { return (__m512bh)_mm512_loadu_si512(p); });
    if (i < n)
        step(i, [m = n - i](const uint16_t* p) { return (__m512bh)_mm512_maskz_loadu_epi16((__mmask32)((1ull << m) - 1), p); });
    for (int r = 0; r < R; r++) sums[r] = totals(s[r][0], s[r][1], s[r][2], s[r][3]);
}
#endif

template <class E>
inline void tiles(const E* const* rows, const E* const* x, long count, long n, F4* sums) {
    long r = 0;
    for (; r + TILE <= count; r += TILE) tile<TILE>(rows, x + r, n, sums + r);
    switch (count - r) {
#if defined(DS_AVX512)
        case 5: return tile<5>(rows, x + r, n, sums + r);
        case 4: return tile<4>(rows, x + r, n, sums + r);
        case 3: return tile<3>(rows, x + r, n, sums + r);
        case 2: return tile<2>(rows, x + r, n, sums + r);
#endif
        case 1: return tile<1>(rows, x + r, n, sums + r);
    }
}

inline void unpacked(const Weight& w, long j, float* to, const float* scales, const float* lows, float* room) {
    if (w.group && is_direct(w)) return unpack(w, line(w, j), scales, lows, true, [&](long i, F x) { store(to + i, x); });
    widen_row(w, j, to, room);
}

#if defined(DS_BF16)
inline void unpacked(const Weight& w, long j, uint16_t* to, const float* scales, const float* lows, float* room) {
    const auto put = [&](long i, F x) { _mm256_storeu_si256((__m256i*)(to + i), (__m256i)_mm512_cvtneps_pbh(x)); };
    if (w.group && is_direct(w)) return unpack(w, line(w, j), scales, lows, true, put);
    if (w.form != F32) widen_row(w, j, room, room + whole(w.in));
    narrow_as<BF16>(to, w.form == F32 ? (const float*)line(w, j) : room, w.in, false);
}
#endif

// The rows of `w` that are multiplied as they lie in memory.
inline bool as_it_is(const Weight& w, float) { return w.form == F32; }
inline bool as_it_is(const Weight& w, uint16_t) { return w.form == BF16; }

// y[r][0 .. to - from) = x[r] . rows from .. to; x and products in E. room: J rows in E, one in fp32, then two factors a group.
template <class E>
inline void several(
    const Weight& w, long from, long to, const E* const* x, long count, float* const* y, const float* scales,
    const float* lows, float* room) {
    const long wide = whole(w.in), groups = w.group ? w.in / w.group : 0;
    E* made = (E*)room;
    F4 sums[MOST_ROWS];
    for (long j = from; j < to; j += J) {
        const E* rows[J];
        for (int k = 0; k < J; k++) {
            const long place = least(j + k, to - 1), of = (place - from) * groups;
            rows[k] = as_it_is(w, E()) ? (const E*)line(w, place) : made + k * wide;
            if (rows[k] == made + k * wide && j + k < to)
                unpacked(w, place, made + k * wide, scales + of, lows ? lows + of : nullptr, room + J * wide);
            else if (j + k >= to)
                rows[k] = rows[0];
        }
        prefetch(line(w, j + J), line(w, J) - line(w, 0));
        tiles(rows, x, count, w.in, sums);
        const size_t real = (size_t)least(J, to - j) * 4;
        for (long r = 0; r < count; r++) memcpy(y[r] + (j - from), &sums[r], real);
    }
}

// -- weights with contiguous columns ----------------------------------------------------------------------------------

template <int T>
inline void by_columns(const Weight& w, long from, long to, const float* const* x, long count, float* const* y) {
    typedef const typename Of<T>::element* E;
    for (long r = 0; r < count; r++) memset(y[r], 0, (size_t)(to - from) * 4);
    for (long i = 0; i < w.in; i += J) {
        E columns[J];
        long places[J];
        for (int k = 0; k < J; k++) {
            places[k] = least(i + k, w.in - 1);
            columns[k] = (E)w.data + places[k] * w.stride + from;
        }
        const long real = least(J, w.in - i);
        each(to - from, [&](long j, long m) {
            F v[J];
            for (int k = 0; k < J; k++) v[k] = m == W ? Of<T>::get(columns[k] + j) : get_some<T>(columns[k] + j, m);
            for (long r = 0; r < count; r++) {
                F sum = part(y[r] + j, m);
                for (int k = 0; k < real; k++) sum = fma(v[k], set(x[r][places[k]]), sum);
                put(y[r] + j, sum, m);
            }
        });
    }
}

#include "integers.h"

// -- all ------------------------------------------------------------------------------------------------------------

// [Note: room] of a product, in floats: x as the kernels want it (of all rows; sums of groups behind it where there is one), the
// factors of all rows of a unit, then what `several` takes.
inline long room_of_product(const Weight& w, long unit, long count) {
    const long groups = w.group ? w.in / w.group : 0;
    return count * whole(w.in) + whole(groups) + whole(2 * unit * groups) + (J + 2) * whole(w.in) + whole(2 * groups);
}

inline bool in_bf16(const Run& run, const Weight& w, long count) {
#if defined(DS_BF16)
    return run.bf16 && count > 1 && !w.columns;
#else
    return false;
#endif
}

inline bool prepared_alike(const Weight& a, const Weight& b) {
    return a.form == b.form && a.group == b.group && !a.lows == !b.lows && a.columns == b.columns;
}

// x as the kernels want it, at the beginning of the room. It is made once by each thread for products of one x between two
// barriers (op: null: always); others that use the room leave `prepared` null.
inline void prepare(const Op* op, const Run& run, const Weight& w, const float* const* x, long count, Thread& t) {
    const Op* last = t.prepared;
    t.prepared = op;
    if (op && last && op->x == last->x && op->phase == last->phase && prepared_alike(op->a, last->a)) return;
    if (w.columns) return;
#if defined(DS_BF16)
    if (in_integers(run, w)) {
        const Blocks blocks(w);
        for (long r = 0; r < count; r++) round_row(w, blocks, x[r], t.room + r * rounded_size(w, count), are_few(w, count));
        return;
    }
#endif
    const bool four = w.form == INT4 && is_direct(w), narrows = in_bf16(run, w, count);
    if (count == 1 && is_direct(w)) {
        rearranged(w, x[0], t.room);
        if (w.lows) sum_groups(w, x[0], t.room + whole(w.in));
    } else if (four || narrows) {
        float* last = t.room + (count - 1) * whole(w.in);  // the last row's place holds each in turn
        for (long r = 0; r < count; r++) {
            float* to = narrows ? last : t.room + r * whole(w.in);
            const float* from = four ? rearranged(w, x[r], to) : x[r];
            if (narrows) narrow_as<BF16>((uint16_t*)t.room + r * whole(w.in), from, w.in, false);
        }
    }
}

// y[r][0 .. to - from) = x[r] . rows from .. to of w.
inline void product(
    const Op* op, const Run& run, const Weight& w, long from, long to, const float* const* x, long count, float* const* y,
    Thread& t) {
    if (w.columns) {
        if (w.form == F32) return by_columns<F32>(w, from, to, x, count, y);
        if (w.form == BF16) return by_columns<BF16>(w, from, to, x, count, y);
        return by_columns<F16>(w, from, to, x, count, y);
    }
    prepare(op, run, w, x, count, t);
    const long wide = whole(w.in), groups = w.group ? w.in / w.group : 0;
#if defined(DS_BF16)
    if (in_integers(run, w)) {
        return in_integers(w, from, to, t.room, count, y, t.room + count * wide);
    }
#endif
    float *scales = t.room + count * wide + whole(groups), *lows = nullptr, *rest = scales + whole(2 * (to - from) * groups);
    if (groups && is_direct(w)) {
        const long n = (to - from) * groups;
        widen_as<F16>(scales, w.scales + from * groups, n);
        if (w.lows) widen_as<F16>(lows = scales + n, w.lows + from * groups, n);
    }
    if (count == 1 && is_direct(w)) {
        const float* moved = rearranges(w) ? t.room : x[0];
        for (long j = from; j < to; j += J) {
            long places[J];
            for (int k = 0; k < J; k++) places[k] = least(j + k, to - 1);
            const F4 sums = one_row(w, places, moved, from, scales, lows);
            memcpy(y[0] + (j - from), &sums, (size_t)least(J, to - j) * 4);
        }
        return;
    }
#if defined(DS_BF16)
    if (in_bf16(run, w, count)) {
        const uint16_t* narrow[MOST_ROWS];
        for (long r = 0; r < count; r++) narrow[r] = (const uint16_t*)t.room + r * wide;
        return several<uint16_t>(w, from, to, narrow, count, y, scales, lows, rest);
    }
#endif
    const float* moved[MOST_ROWS];
    for (long r = 0; r < count; r++) moved[r] = w.form == INT4 && is_direct(w) ? t.room + r * wide : x[r];
    several<float>(w, from, to, moved, count, y, scales, lows, rest);
}
