// Rows of weights in any form as vectors of fp32.
#pragma once

#include "../maths.h"

namespace ds {
namespace inference {
namespace {

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

}  // namespace
}  // namespace inference
}  // namespace ds
