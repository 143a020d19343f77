// Elementwise functions of vectors, sums across lanes, and loops whose last step is a part of a vector.
//
// Of the instruction set that the including file names (DS_AVX512, DS_AVX2 or neither), as all headers that include this.
#pragma once

#include <stdint.h>
#include <string.h>
#if defined(DS_AVX512) || defined(DS_AVX2)
#include <immintrin.h>
#endif

#include "table.h"

namespace ds {
namespace inference {
namespace {

#include "../simd.h"

typedef int32_t I __attribute__((vector_size(W * 4)));

inline long least(long a, long b) { return a < b ? a : b; }

// fn(i, m) for every W of n elements; m: how many of them there are.
template <class Fn>
inline void each(long n, Fn fn) {
    long i = 0;
    for (; i + W <= n; i += W) fn(i, (long)W);  // `part` and `put` are plain there once they are inlined
    if (i < n) fn(i, n - i);
}

#if defined(DS_AVX512)
inline F part(const float* from, long m) { return _mm512_maskz_loadu_ps((__mmask16)((1u << m) - 1), from); }
inline void put(float* to, F x, long m) { _mm512_mask_storeu_ps(to, (__mmask16)((1u << m) - 1), x); }
#else
inline F part(const float* from, long m) { return m == W ? load(from) : get_some<F32>(from, m); }
inline void put(float* to, F x, long m) { m == W ? store(to, x) : put_some<F32>(to, x, m); }
#endif

inline F first_lanes(F x, long m) {
    float all[W];
    store(all, x);
    for (long i = m; i < W; i++) all[i] = 0;
    return load(all);
}

inline float total(F x) {
#if defined(DS_AVX512)
    return _mm512_reduce_add_ps(x);  // halves, as below
#endif
    float all[W], sum = 0;
    store(all, x);
    for (int half = W / 2; half > 1; half /= 2)
        for (int i = 0; i < half; i++) all[i] += all[i + half];
    sum = all[0] + all[1];
    return sum;
}

typedef float F4 __attribute__((vector_size(16)));

// The sums of the lanes of four vectors.
inline F4 totals(F a, F b, F c, F d) {
#if defined(DS_AVX512)
    const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    const __m512 all = _mm512_add_ps(
        (__m512)_mm512_unpacklo_pd((__m512d)ab, (__m512d)cd), (__m512)_mm512_unpackhi_pd((__m512d)ab, (__m512d)cd));
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
    return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
#elif defined(DS_AVX2)
    const __m256 ab = _mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
    const __m256 cd = _mm256_add_ps(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
    const __m256 all = _mm256_add_ps(
        (__m256)_mm256_unpacklo_pd((__m256d)ab, (__m256d)cd), (__m256)_mm256_unpackhi_pd((__m256d)ab, (__m256d)cd));
    return _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
#else
    return F4{total(a), total(b), total(c), total(d)};
#endif
}

inline F larger(F a, F b) { return a > b ? a : b; }
inline F smaller(F a, F b) { return a < b ? a : b; }

inline F counting() {  // 0, 1, 2 ...
    F x;
    for (int i = 0; i < W; i++) x[i] = (float)i;
    return x;
}

inline float largest(F x) {
#if defined(DS_AVX512)
    return _mm512_reduce_max_ps(x);
#endif
    float all[W];
    store(all, x);
    for (int half = W / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) all[i] = all[i] > all[i + half] ? all[i] : all[i + half];
    return all[0];
}

// e^x to 1e-7 of its size; 0 from -87 down.
inline F exponential(F x) {
    x = smaller(x, set(88.3762626647949f));
    const F n = nearest(x * set(1.44269504088896341f));
    F r = fma(n, set(-0.693359375f), x);
    r = fma(n, set(2.12194440e-4f), r);
    F y = set(1.9875691500e-4f);
    y = fma(y, r, set(1.3981999507e-3f));
    y = fma(y, r, set(8.3334519073e-3f));
    y = fma(y, r, set(4.1665795894e-2f));
    y = fma(y, r, set(1.6666665459e-1f));
    y = fma(y, r, set(5.0000001201e-1f));
    y = fma(y, r * r, r) + set(1);
    const I power = (__builtin_convertvector(larger(n, set(-127)), I) + 127) << 23;
    return x < set(-87.33f) ? set(0) : y * (F)power;
}

inline F tangent(F x) {  // tanh
    const F small = x * (set(1) - x * x * set(0.333333333f));
    const F y = set(1) - set(2) / (exponential(x + x) + set(1));
    const F size = x < 0 ? -x : x;
    return size < set(0.01f) ? small : y;
}

// erf to 1.5e-7 (Abramowitz and Stegun, 7.1.26).
inline F error_function(F x) {
    const F size = x < 0 ? -x : x;
    const F t = set(1) / fma(set(0.3275911f), size, set(1));
    F y = set(1.061405429f);
    y = fma(y, t, set(-1.453152027f));
    y = fma(y, t, set(1.421413741f));
    y = fma(y, t, set(-0.284496736f));
    y = fma(y, t, set(0.254829592f));
    y = set(1) - y * t * exponential(-size * size);
    return x < 0 ? -y : y;
}

template <int A>
inline F activated(F x) {
    switch (A) {
        case RELU: return larger(x, set(0));
        case GELU: return set(0.5f) * x * (set(1) + error_function(x * set(0.70710678118654752f)));
        case GELU_TANH: {
            const F inner = set(0.79788456080286536f) * fma(set(0.044715f) * x * x, x, x);
            return set(0.5f) * x * (set(1) + tangent(inner));
        }
        case SILU: return x / (set(1) + exponential(-x));
        case QUICK_GELU: return x / (set(1) + exponential(set(-1.702f) * x));
        case TANH: return tangent(x);
        default: return x;
    }
}

// fn(a function of a vector) for the activation that is numbered `which`.
template <class Fn>
inline void with_activation(int which, Fn fn) {
    switch (which) {
        case RELU: return fn([](F x) { return activated<RELU>(x); });
        case GELU: return fn([](F x) { return activated<GELU>(x); });
        case GELU_TANH: return fn([](F x) { return activated<GELU_TANH>(x); });
        case SILU: return fn([](F x) { return activated<SILU>(x); });
        case QUICK_GELU: return fn([](F x) { return activated<QUICK_GELU>(x); });
        case TANH: return fn([](F x) { return activated<TANH>(x); });
        default: return fn([](F x) { return x; });
    }
}

inline void prefetch(const char* at, long size) {
    for (long i = 0; i < size; i += 64) __builtin_prefetch(at + i);
}

inline long size_of(int form) { return form == F32 ? 4 : 2; }

inline F element(const Vector& from, long i, long m) {
    if (from.type == F32) return part((const float*)from.data + i, m);
    const uint16_t* at = (const uint16_t*)from.data + i;
    return from.type == BF16 ? get_some<BF16>(at, m) : get_some<F16>(at, m);
}

// to = activation(y + bias) + added; `first`: where in the bias y begins.
inline void completed(const Op& op, const float* y, long first, const float* added, float* to, long n) {
    if (y == to && !op.bias.data && op.activation == NOTHING && !added) return;
    with_activation(op.activation, [&](auto act) {
        each(n, [&](long i, long m) {
            F x = part(y + i, m);
            if (op.bias.data) x += element(op.bias, first + i, m);
            x = act(x);
            if (added) x += part(added + i, m);
            put(to + i, x, m);
        });
    });
}

// to = activation(y + bias) * (z + second)
inline void gate(const Op& op, const float* y, const float* z, long first, float* to, long n) {
    with_activation(op.activation, [&](auto act) {
        each(n, [&](long i, long m) {
            F a = part(y + i, m), b = part(z + i, m);
            if (op.bias.data) a += element(op.bias, first + i, m);
            if (op.second.data) b += element(op.second, first + i, m);
            put(to + i, act(a) * b, m);
        });
    });
}

}  // namespace
}  // namespace inference
}  // namespace ds
