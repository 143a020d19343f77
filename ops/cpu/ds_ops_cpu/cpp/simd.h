// Vectors of W floats: GCC's vector extension, with intrinsics only where it has no word for something.
// Included once per instruction set, inside that set's own anonymous namespace (see isa.h).

#if defined(DS_AVX512)
constexpr int W = 16;
#elif defined(DS_AVX2)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float F __attribute__((vector_size(W * 4)));
typedef uint32_t U __attribute__((vector_size(W * 4)));
typedef uint16_t H __attribute__((vector_size(W * 2)));
typedef float F2 __attribute__((vector_size(W * 2)));   // half as many floats ...
typedef double D2 __attribute__((vector_size(W * 4)));  // ... are a full register of doubles

inline F set(float x) { return F{} + x; }

inline F load(const float* from) {
    F x;
    memcpy(&x, from, sizeof x);
    return x;
}

inline void store(float* to, F x) { memcpy(to, &x, sizeof x); }

// a * b + c: one rounding where the processor has it. Nothing else is contracted (-ffp-contract=off), so an element's
// result does not depend on where in a tensor it lies.
inline F fma(F a, F b, F c) {
#if defined(DS_AVX512)
    return _mm512_fmadd_ps(a, b, c);
#elif defined(DS_AVX2)
    return _mm256_fmadd_ps(a, b, c);
#else
    return a * b + c;
#endif
}

inline F root(F x) {
#if defined(DS_AVX512)
    return _mm512_sqrt_ps(x);
#elif defined(DS_AVX2)
    return _mm256_sqrt_ps(x);
#else
    F y;
    for (int i = 0; i < W; i++) y[i] = __builtin_sqrtf(x[i]);
    return y;
#endif
}

// To the nearest whole number, halves to the even one.
inline F nearest(F x) {
#if defined(DS_AVX512)
    return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(DS_AVX2)
    return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    F y;
    for (int i = 0; i < W; i++) y[i] = __builtin_rintf(x[i]);
    return y;
#endif
}

// 1, 0 or -1; NaN gives 0, as torch.sign does.
inline F sign(F x) { return (x > 0 ? set(1) : set(0)) - (x < 0 ? set(1) : set(0)); }

// -- bfloat16 ------------------------------------------------------------------------------------------------------

// GCC 12 takes five instructions to convert a whole vector where these take one or two.
#if defined(DS_AVX512)
inline U widened(H h) { return (U)_mm512_cvtepu16_epi32((__m256i)h); }
inline H narrowed(U u) { return (H)_mm512_cvtepi32_epi16((__m512i)u); }
#elif defined(DS_AVX2)
inline U widened(H h) { return (U)_mm256_cvtepu16_epi32((__m128i)h); }
inline H narrowed(U u) {  // each below 65536
    return (H)_mm_packus_epi32(_mm256_castsi256_si128((__m256i)u), _mm256_extracti128_si256((__m256i)u, 1));
}
#else
inline U widened(H h) { return __builtin_convertvector(h, U); }
inline H narrowed(U u) { return __builtin_convertvector(u, H); }
#endif

inline F from_bf16(H h) { return (F)(widened(h) << 16); }

// Round to nearest, ties to even; every NaN becomes the quiet one that torch writes.
inline H to_bf16(F x) {
    U u = (U)x;
    U r = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    r = (x != x) ? (U{} + 0x7fc0u) : r;
    return narrowed(r);
}

// 2 W elements at a time, those at even places and those at odd ones, which a shift and a mask bring into place: in the
// order of memory each W of them would be converted by three more instructions.
inline void load_pairs(const uint16_t* from, F& even, F& odd) {
    U u;
    memcpy(&u, from, sizeof u);
    even = (F)(u << 16);
    odd = (F)(u & 0xffff0000u);
}

// For what was calculated from bf16: a NaN then has nothing in its low half, so that rounding leaves it one.
inline void store_pairs(uint16_t* to, F even, F odd) {
    U u = (U)even, v = (U)odd;
    u += ((u >> 16) & 1u) + 0x7fffu;
    v += ((v >> 16) & 1u) + 0x7fffu;
    u = (u >> 16) | (v & 0xffff0000u);
    memcpy(to, &u, sizeof u);
}

// -- float16 -------------------------------------------------------------------------------------------------------

#if defined(DS_AVX512)
inline F from_f16(H h) { return _mm512_cvtph_ps((__m256i)h); }
inline H to_f16(F x) { return (H)_mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
#elif defined(DS_AVX2)
inline F from_f16(H h) { return _mm256_cvtph_ps((__m128i)h); }
inline H to_f16(F x) { return (H)_mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
#else
inline float as_float(uint32_t u) {
    float f;
    memcpy(&f, &u, 4);
    return f;
}
inline uint32_t as_bits(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    return u;
}

inline float wide(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16, rest = (uint32_t)(h & 0x7fffu) << 13;
    uint32_t exponent = rest & 0x0f800000u;
    rest += 112u << 23;                                          // from a bias of 15 to one of 127
    if (exponent == 0x0f800000u) rest += 112u << 23;             // inf, NaN
    else if (exponent == 0)                                      // zero, subnormal: let the processor normalise
        rest = as_bits(as_float(rest + (1u << 23)) - as_float(113u << 23));
    return as_float(rest | sign);
}

inline uint16_t narrow1(float f) {
    uint32_t u = as_bits(f), sign = (u >> 16) & 0x8000u, rest = u & 0x7fffffffu;
    if (rest > 0x7f800000u) return (uint16_t)(sign | 0x7e00u);   // NaN
    if (rest >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u);  // rounds to beyond 65504: inf
    if (rest < 0x38800000u)                                      // subnormal: adding 0.5 rounds at the right bit
        return (uint16_t)(sign | (as_bits(as_float(rest) + 0.5f) - 0x3f000000u));
    rest += (uint32_t)(15 - 127) * (1u << 23) + 0xfffu + ((rest >> 13) & 1u);
    return (uint16_t)(sign | (rest >> 13));
}

inline F from_f16(H h) {
    F y;
    for (int i = 0; i < W; i++) y[i] = wide(h[i]);
    return y;
}
inline H to_f16(F x) {
    H y;
    for (int i = 0; i < W; i++) y[i] = narrow1(x[i]);
    return y;
}
#endif

// -- elements of any type --------------------------------------------------------------------------------------------

template <int T>
struct Of;
template <>
struct Of<F32> {
    typedef float element;
    static F get(const float* from) { return load(from); }
    static void put(float* to, F x) { store(to, x); }
};
template <>
struct Of<BF16> {
    typedef uint16_t element;
    static F get(const uint16_t* from) {
        H h;
        memcpy(&h, from, sizeof h);
        return from_bf16(h);
    }
    static H pack(F x) { return to_bf16(x); }
    static void put(uint16_t* to, F x) {
        const H h = pack(x);
        memcpy(to, &h, sizeof h);
    }
};
template <>
struct Of<F16> {
    typedef uint16_t element;
    static F get(const uint16_t* from) {
        H h;
        memcpy(&h, from, sizeof h);
        return from_f16(h);
    }
    static H pack(F x) { return to_f16(x); }
    static void put(uint16_t* to, F x) {
        const H h = pack(x);
        memcpy(to, &h, sizeof h);
    }
};

// The first `n` of W elements, where a block ends before the vector does; the rest zeros.
template <int T>
inline F get_some(const typename Of<T>::element* from, long n) {
    if (n >= W) return Of<T>::get(from);
    typename Of<T>::element padded[W] = {};
    memcpy(padded, from, (size_t)n * sizeof padded[0]);
    return Of<T>::get(padded);
}

template <int T>
inline void put_some(typename Of<T>::element* to, F x, long n) {
    if (n >= W) return Of<T>::put(to, x);
    typename Of<T>::element all[W];
    Of<T>::put(all, x);
    memcpy(to, all, (size_t)n * sizeof all[0]);
}

template <int T>
inline void widen_as(float* to, const uint16_t* from, long n) {
    long i = 0;
    for (; i + W <= n; i += W) store(to + i, Of<T>::get(from + i));
    if (i < n) put_some<F32>(to + i, get_some<T>(from + i, n - i), n - i);
}

inline void stream(uint16_t* to, H h) {
#if defined(DS_AVX512)
    _mm256_stream_si256((__m256i*)to, (__m256i)h);
#elif defined(DS_AVX2)
    _mm_stream_si128((__m128i*)to, (__m128i)h);
#else
    memcpy(to, &h, sizeof h);
#endif
}

template <int T>
inline void narrow_as(uint16_t* to, const float* from, long n, bool past_cache) {
    long i = 0;
    if (past_cache && ((uintptr_t)to % sizeof(H)) == 0) {
        for (; i + W <= n; i += W) stream(to + i, Of<T>::pack(load(from + i)));
    }
    for (; i + W <= n; i += W) {
        H h = Of<T>::pack(load(from + i));
        memcpy(to + i, &h, sizeof h);
    }
    if (i < n) put_some<T>(to + i, get_some<F32>(from + i, n - i), n - i);
}

inline void widen(float* to, const void* from, int type, long n) {
    if (type == BF16) widen_as<BF16>(to, (const uint16_t*)from, n);
    else widen_as<F16>(to, (const uint16_t*)from, n);
}

inline void narrow(void* to, const float* from, int type, long n, bool past_cache = false) {
    if (type == BF16) narrow_as<BF16>((uint16_t*)to, from, n, past_cache);
    else narrow_as<F16>((uint16_t*)to, from, n, past_cache);
}

// A block of a tensor as fp32: the tensor's own memory, or room that is filled from it.
inline float* open(void* from, int type, float* room, long n) {
    if (type == F32) return (float*)from;
    widen(room, from, type, n);
    return room;
}
