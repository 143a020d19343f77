// Products of weights with several rows of x, and of weights whose columns are contiguous.
//
// Four rows of weights are unpacked into the first-level cache, and each vector of them is multiplied with up to TILE
// rows of x.
#pragma once

#include "unpack.h"

namespace ds {
namespace inference {
namespace {

#if defined(DS_AVX512)
constexpr int TILE = 6;  // 24 sums, 4 weights and an x in 32 registers
#else
constexpr int TILE = 2;
#endif

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

}  // namespace
}  // namespace inference
}  // namespace ds
