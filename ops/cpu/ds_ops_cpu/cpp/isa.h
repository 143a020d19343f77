// Every kernel over one block, for the instruction set that the including file names. [Note: the order of roundings]
// follows the references in ds_core.kernels, which follow torch; 16-bit operands are widened, worked on in fp32 and
// rounded once at the end.
#include <stdint.h>
#include <string.h>
#if defined(DS_AVX512) || defined(DS_AVX2)
#include <immintrin.h>
#endif

#include "ops.h"

namespace ds {
namespace {

#include "simd.h"

// [Note: prefetching] A step reads four streams, more than some processors' own prefetching keeps up with, and that
// stops at every page. Asking for what comes AHEAD bytes later is worth 5 % on an AMD EPYC 9005.
constexpr long AHEAD = 2048;

inline void ahead(const void* from) { __builtin_prefetch((const char*)from + AHEAD); }

// f(param, grad, first, second) on W elements at a time; the last few go through the same code, padded. T: the type of
// parameters and states, G: of gradients. The copy is written in the same pass.
template <int T, int G, class Fn>
inline void sweep(void* params, const void* grads, void* first, void* second, const Block& k, const Types& t, Fn f) {
    typedef typename Of<T>::element E;
    auto p = (E*)params, a = (E*)first, b = (E*)second;
    auto g = (const typename Of<G>::element*)grads;
    const bool to_bf16 = k.copy && t.copy == BF16, to_f16 = k.copy && t.copy == F16;
    const bool past = t.stream && (uintptr_t)k.copy % sizeof(H) == 0;
    auto c = (uint16_t*)k.copy;
    const F none = set(0);
    const long n = k.n;
    long i = 0;
    if constexpr (T == BF16 && G == BF16) {
        for (; i + 2 * W <= n; i += 2 * W) {
            F x[2], d[2], y[2] = {}, z[2] = {};
            ahead(p + i);
            ahead(g + i);
            load_pairs(p + i, x[0], x[1]);
            load_pairs(g + i, d[0], d[1]);
            if (a) {
                ahead(a + i);
                load_pairs(a + i, y[0], y[1]);
            }
            if (b) {
                ahead(b + i);
                load_pairs(b + i, z[0], z[1]);
            }
            f(x[0], d[0], y[0], z[0]);
            f(x[1], d[1], y[1], z[1]);
            store_pairs(p + i, x[0], x[1]);
            if (a) store_pairs(a + i, y[0], y[1]);
            if (b) store_pairs(b + i, z[0], z[1]);
        }
    }
    for (; i + W <= n; i += W) {
        ahead(p + i);
        ahead(g + i);
        F x = Of<T>::get(p + i), y = none, z = none;
        if (a) {
            ahead(a + i);
            y = Of<T>::get(a + i);
        }
        if (b) {
            ahead(b + i);
            z = Of<T>::get(b + i);
        }
        f(x, Of<G>::get(g + i), y, z);
        Of<T>::put(p + i, x);
        if (a) Of<T>::put(a + i, y);
        if (b) Of<T>::put(b + i, z);
        if (to_bf16) past ? stream(c + i, Of<BF16>::pack(x)) : Of<BF16>::put(c + i, x);
        if (to_f16) past ? stream(c + i, Of<F16>::pack(x)) : Of<F16>::put(c + i, x);
    }
    if (i < n) {
        const long m = n - i;
        F x = get_some<T>(p + i, m), y = a ? get_some<T>(a + i, m) : none, z = b ? get_some<T>(b + i, m) : none;
        f(x, get_some<G>(g + i, m), y, z);
        put_some<T>(p + i, x, m);
        if (a) put_some<T>(a + i, y, m);
        if (b) put_some<T>(b + i, z, m);
        if (to_bf16) put_some<BF16>(c + i, x, m);
        if (to_f16) put_some<F16>(c + i, x, m);
    }
}

inline long bytes_of(int type) { return type == F32 ? 4 : 2; }

// `n` elements of a block from `at` on.
inline Block part(const Block& k, const Types& t, long at, long n) {
    return {(char*)k.param + at * bytes_of(t.param),
            (const char*)k.grad + at * bytes_of(t.grad),
            k.first ? (char*)k.first + at * bytes_of(t.state) : nullptr,
            k.second ? (char*)k.second + at * bytes_of(t.state) : nullptr,
            k.copy ? (char*)k.copy + at * bytes_of(t.copy) : nullptr,
            n};
}

// Runs `f` over the block. fp32 with any gradients, and bf16 throughout, are read and written in one pass; other
// mixtures are widened in the first-level cache before and narrowed after.
template <class Fn>
inline void update(const Block& k, const Types& t, Fn f) {
    const bool stateless = !k.first;
    if (t.param == BF16 && t.grad == BF16 && (stateless || t.state == BF16))
        return sweep<BF16, BF16>(k.param, k.grad, k.first, k.second, k, t, f);
    const bool wide = t.param == F32 && (stateless || t.state == F32);
    if (!wide && k.n > BLOCK) {
        for (long at = 0; at < k.n; at += BLOCK) update(part(k, t, at, k.n - at < BLOCK ? k.n - at : BLOCK), t, f);
        return;
    }
    alignas(64) float room[3][BLOCK];
    float* p = open(k.param, t.param, room[0], k.n);
    float* a = k.first ? open(k.first, t.state, room[1], k.n) : nullptr;
    float* b = k.second ? open(k.second, t.state, room[2], k.n) : nullptr;
    if (t.grad == F32) sweep<F32, F32>(p, k.grad, a, b, k, t, f);
    else if (t.grad == BF16) sweep<F32, BF16>(p, k.grad, a, b, k, t, f);
    else sweep<F32, F16>(p, k.grad, a, b, k, t, f);
    if (t.param != F32) narrow(k.param, p, t.param, k.n);
    if (a && t.state != F32) narrow(k.first, a, t.state, k.n);
    if (b && t.state != F32) narrow(k.second, b, t.state, k.n);
}

void adam(const Block& k, const Types& t, const AdamFactors& c) {
    const F scale = set(c.scale), l2 = set(c.l2), keep = set(c.keep), fresh1 = set(c.one_minus_beta1);
    const F beta2 = set(c.beta2), fresh2 = set(c.one_minus_beta2), inverse = set(c.inverse_correction2);
    const F eps = set(c.eps), step = set(c.step_size);
    if (c.l2 == 0) {
        update(k, t, [=](F& p, F g, F& m, F& v) {
            g = g * scale;
            m = fma(fresh1, g - m, m);
            v = fma(fresh2 * g, g, beta2 * v);
            p = p * keep - step * m / fma(root(v), inverse, eps);
        });
    } else {
        update(k, t, [=](F& p, F g, F& m, F& v) {
            g = fma(l2, p, g * scale);
            m = fma(fresh1, g - m, m);
            v = fma(fresh2 * g, g, beta2 * v);
            p = p - step * m / fma(root(v), inverse, eps);
        });
    }
}

void adagrad(const Block& k, const Types& t, const AdagradFactors& c) {
    const F scale = set(c.scale), l2 = set(c.l2), eps = set(c.eps), step = set(c.step_size);
    const bool decays = c.l2 != 0;
    update(k, t, [=](F& p, F g, F& s, F&) {
        g = g * scale;
        if (decays) g = fma(l2, p, g);
        s = fma(g, g, s);
        p = p - step * g / (root(s) + eps);
    });
}

void lion(const Block& k, const Types& t, const LionFactors& c) {
    const F scale = set(c.scale), keep = set(c.keep), fresh1 = set(c.one_minus_beta1);
    const F fresh2 = set(c.one_minus_beta2), lr = set(c.lr);
    update(k, t, [=](F& p, F g, F& m, F&) {
        g = g * scale;
        const F change = g - m;
        p = p * keep - lr * sign(fma(fresh1, change, m));
        m = fma(fresh2, change, m);
    });
}

void sgd(const Block& k, const Types& t, const SgdFactors& c) {
    const F scale = set(c.scale), l2 = set(c.l2), momentum = set(c.momentum), fresh = set(c.fresh), lr = set(c.lr);
    const bool decays = c.l2 != 0, has_momentum = k.first != nullptr, nesterov = c.nesterov, first = c.first;
    update(k, t, [=](F& p, F g, F& m, F&) {
        g = g * scale;
        if (decays) g = fma(l2, p, g);
        if (has_momentum) {
            m = first ? g : fma(momentum, m, fresh * g);
            g = nesterov ? fma(momentum, m, g) : m;
        }
        p = p - lr * g;
    });
}

// -- sums of squares -------------------------------------------------------------------------------------------------

inline double sum_of(D2 x) {
    double lanes[W / 2], all = 0;
    memcpy(lanes, &x, sizeof lanes);
    for (double lane : lanes) all += lane;
    return all;
}

// In fp64: finite exactly when every element is.
struct Squares {
    D2 sums[2] = {};

    inline void add(F x) {
        F2 halves[2];
        memcpy(halves, &x, sizeof x);
        for (int j = 0; j < 2; j++) {
            const D2 wide = __builtin_convertvector(halves[j], D2);
            sums[j] += wide * wide;
        }
    }
    inline double total() const { return sum_of(sums[0] + sums[1]); }
};

// Of one block: in fp32, where each lane adds BLOCK / LANES squares, and again in fp64 where that is out of range.
template <int T>
inline double squares_of(const void* from, long n) {
    auto x = (const typename Of<T>::element*)from;
    F sums[LANES / W] = {};
    long i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int j = 0; j < LANES / W; j++) {
            ahead(x + i + j * W);
            const F y = Of<T>::get(x + i + j * W);
            sums[j] = fma(y, y, sums[j]);
        }
    for (; i < n; i += W) {
        const F y = get_some<T>(x + i, n - i < W ? n - i : W);
        sums[0] = fma(y, y, sums[0]);
    }
    F2 halves[2 * LANES / W];
    memcpy(halves, sums, sizeof halves);
    D2 wide = {};
    for (F2 half : halves) wide += __builtin_convertvector(half, D2);
    const double all = sum_of(wide);
    if (all > 1e-25 && all < 1e35) return all;
    Squares exact;
    for (i = 0; i < n; i += W) exact.add(get_some<T>(x + i, n - i < W ? n - i : W));
    return exact.total();
}

double squared_norm(const void* x, int type, long n) {
    if (type == F32) return squares_of<F32>(x, n);
    if (type == BF16) return squares_of<BF16>(x, n);
    if (type == F16) return squares_of<F16>(x, n);
    auto wide = (const double*)x;
    double lanes[8] = {}, all = 0;
    for (long i = 0; i < n; i++) lanes[i % 8] += wide[i] * wide[i];
    for (double lane : lanes) all += lane;
    return all;
}

// -- LAMB ------------------------------------------------------------------------------------------------------------

inline F lamb_update(F p, F m, F v, const LambFactors& c) {
    const F eps = set(c.eps), below = c.eps_inside ? root(v + eps) : root(v) + eps;
    return fma(set(c.decay), p, m / below);
}

void lamb_moments(const Block& k, const Types& t, const LambFactors& c, double* param_norm, double* update_norm) {
    alignas(64) float room[3][BLOCK], grads[BLOCK];
    const float* p = open(k.param, t.param, room[0], k.n);
    float* m = open(k.first, t.state, room[1], k.n);
    float* v = open(k.second, t.state, room[2], k.n);
    const float* g = open(const_cast<void*>(k.grad), t.grad, grads, k.n);
    for (long i = 0; i < k.n; i += W) {
        const long left = k.n - i < W ? k.n - i : W;
        const F grad = get_some<F32>(g + i, left) * set(c.scale);
        const F first = fma(set(c.beta1), get_some<F32>(m + i, left), set(c.one_minus_beta1) * grad);
        const F second = fma(set(c.one_minus_beta2) * grad, grad, set(c.beta2) * get_some<F32>(v + i, left));
        put_some<F32>(m + i, first, left);
        put_some<F32>(v + i, second, left);
    }
    if (t.state != F32) {  // the update is worked out from the moments as they are stored, here and in lamb_apply
        narrow(k.first, m, t.state, k.n);
        narrow(k.second, v, t.state, k.n);
        widen(m, k.first, t.state, k.n);
        widen(v, k.second, t.state, k.n);
    }
    Squares params, updates;
    for (long i = 0; i < k.n; i += W) {
        const long left = k.n - i < W ? k.n - i : W;
        const F x = get_some<F32>(p + i, left);
        F u = lamb_update(x, get_some<F32>(m + i, left), get_some<F32>(v + i, left), c);
        if (left < W) {  // 0 / 0 in the padding, when eps is 0
            float kept[W] = {};
            put_some<F32>(kept, u, left);
            u = load(kept);
        }
        params.add(x);
        updates.add(u);
    }
    *param_norm = params.total();
    *update_norm = updates.total();
}

void lamb_apply(const Block& k, const Types& t, const LambFactors& c, float step) {
    alignas(64) float room[3][BLOCK];
    float* p = open(k.param, t.param, room[0], k.n);
    const float* m = open(k.first, t.state, room[1], k.n);
    const float* v = open(k.second, t.state, room[2], k.n);
    for (long i = 0; i < k.n; i += W) {
        const long left = k.n - i < W ? k.n - i : W;
        const F x = get_some<F32>(p + i, left);
        const F u = lamb_update(x, get_some<F32>(m + i, left), get_some<F32>(v + i, left), c);
        put_some<F32>(p + i, x - set(step) * u, left);
    }
    if (t.param != F32) narrow(k.param, p, t.param, k.n);
    if (k.copy) narrow(k.copy, p, t.copy, k.n, t.stream);
}

// -- gradients of several micro-batches ------------------------------------------------------------------------------

template <int T>
inline void accumulate_as(float* into, const void* from, float scale, long n) {
    auto x = (const typename Of<T>::element*)from;
    const F s = set(scale);
    long i = 0;
    for (; i + W <= n; i += W) store(into + i, fma(Of<T>::get(x + i), s, load(into + i)));
    if (i < n) put_some<F32>(into + i, fma(get_some<T>(x + i, n - i), s, get_some<F32>(into + i, n - i)), n - i);
}

void accumulate(float* into, const void* x, int type, float scale, long n) {
    if (type == F32) accumulate_as<F32>(into, x, scale, n);
    else if (type == BF16) accumulate_as<BF16>(into, x, scale, n);
    else accumulate_as<F16>(into, x, scale, n);
}

// -- quantisation of one group -----------------------------------------------------------------------------------------

inline const float* piece(const void* x, int type, long start, float* room, long n) {
    return open((char*)const_cast<void*>(x) + start * bytes_of(type), type, room, n);
}

// Smallest and largest element of a group that is not empty; NaN in both when there is one.
inline void range(const void* x, int type, long n, float* low, float* high) {
    alignas(64) float room[BLOCK];
    float lo = __builtin_inff(), hi = -__builtin_inff();
    bool odd = false;
    for (long start = 0; start < n; start += BLOCK) {
        const long m = n - start < BLOCK ? n - start : BLOCK;
        const float* y = piece(x, type, start, room, m);
        F least = set(y[0]), most = least;
        U nan = {};
        long i = 0;
        for (; i + W <= m; i += W) {
            const F z = load(y + i);
            least = z < least ? z : least;
            most = z > most ? z : most;
            nan |= (U)(z != z);
        }
        for (int j = 0; j < W; j++) {
            lo = least[j] < lo ? least[j] : lo;
            hi = most[j] > hi ? most[j] : hi;
            odd |= nan[j] != 0;
        }
        for (; i < m; i++) {
            lo = y[i] < lo ? y[i] : lo;
            hi = y[i] > hi ? y[i] : hi;
            odd |= y[i] != y[i];
        }
    }
    *low = odd ? __builtin_nanf("") : lo;
    *high = odd ? __builtin_nanf("") : hi;
}

void quantize(const void* x, int type, long n, int bits, bool symmetric, void* out, float* scale, float* low) {
    float lo, hi;
    range(x, type, n, &lo, &hi);
    const int most = symmetric ? (1 << (bits - 1)) - 1 : (1 << bits) - 1, least = symmetric ? -most : 0;
    const float reach = symmetric ? (-lo > hi ? -lo : hi) : hi - lo;
    const float step = reach / (float)most;
    *scale = step;
    if (low) *low = lo;
    // A group that is all one value, or that holds inf or NaN, has no steps: zeros, and the scale tells.
    const bool flat = !(step > 0 && step < __builtin_inff());
    const F below = set(symmetric ? 0 : lo), by = set(step), top = set((float)most), bottom = set((float)least);
    alignas(64) float room[BLOCK];
    alignas(64) int32_t q[BLOCK];
    auto bytes = (uint8_t*)out;
    for (long start = 0; start < n; start += BLOCK) {
        const long m = n - start < BLOCK ? n - start : BLOCK;
        if (flat) {
            memset(q, 0, sizeof q);
        } else {
            const float* y = piece(x, type, start, room, m);
            for (long i = 0; i < m; i += W) {
                F z = nearest((get_some<F32>(y + i, m - i < W ? m - i : W) - below) / by);
                z = z > top ? top : z;
                z = z < bottom ? bottom : z;
                float whole[W];
                store(whole, z);
                for (int j = 0; j < W; j++) q[i + j] = (int32_t)whole[j];
            }
        }
        if (bits == 8) {
            for (long i = 0; i < m; i++) bytes[start + i] = (uint8_t)q[i];
        } else {  // two to a byte, the first in the low half
            for (long i = 0; i < m; i += 2)
                bytes[(start + i) / 2] = (uint8_t)((q[i] & 15) | ((i + 1 < m ? q[i + 1] & 15 : 0) << 4));
        }
    }
}

// W values from `i` on, a multiple of W.
template <int BITS>
inline F values(const uint8_t* q, long i) {
#if defined(DS_AVX512) || defined(DS_AVX2)
    __m128i x;
    if (BITS == 8) {
        x = W == 16 ? _mm_loadu_si128((const __m128i*)(q + i)) : _mm_loadl_epi64((const __m128i*)(q + i));
    } else {  // of each byte the low half comes first; 8 and above stand for what is 16 less
        uint64_t pairs = 0;
        memcpy(&pairs, q + i / 2, W / 2);
        const __m128i b = _mm_set_epi64x(0, (long long)pairs), half = _mm_set1_epi8(15), sign = _mm_set1_epi8(8);
        x = _mm_unpacklo_epi8(_mm_and_si128(b, half), _mm_and_si128(_mm_srli_epi16(b, 4), half));
        x = _mm_sub_epi8(_mm_xor_si128(x, sign), sign);
    }
#if defined(DS_AVX512)
    return (F)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(x));
#else
    return (F)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(x));
#endif
#else
    F out;
    for (int j = 0; j < W; j++) {
        const int half = (q[(i + j) / 2] >> (j % 2 * 4)) & 15;
        out[j] = (float)(BITS == 8 ? (int)(int8_t)q[i + j] : (half ^ 8) - 8);
    }
    return out;
#endif
}

template <int BITS>
inline void add_values(const uint8_t* q, float scale, bool first, float* into, long n) {
    const F s = set(scale);
    long i = 0;
    if (first) {
        for (; i + W <= n; i += W) store(into + i, values<BITS>(q, i) * s);
    } else {
        for (; i + W <= n; i += W) store(into + i, load(into + i) + values<BITS>(q, i) * s);
    }
    if (i == n) return;
    uint8_t some[W] = {};
    memcpy(some, q + i * BITS / 8, (size_t)((n - i) * BITS + 7) / 8);
    const F x = values<BITS>(some, 0) * s;
    put_some<F32>(into + i, first ? x : get_some<F32>(into + i, n - i) + x, n - i);
}

void add_quantized(const void* q, int bits, float scale, bool first, float* into, long n) {
    if (bits == 8) add_values<8>((const uint8_t*)q, scale, first, into, n);
    else add_values<4>((const uint8_t*)q, scale, first, into, n);
}

void narrow_all(void* to, const float* from, int type, long n) {
    if (type == F32) memcpy(to, from, (size_t)n * 4);
    else narrow(to, from, type, n);
}

void dequantize(const void* from, int bits, float scale, const float* low, void* out, int type, long n) {
    alignas(64) float room[BLOCK];
    auto q = (const uint8_t*)from;
    const bool symmetric = low == nullptr;
    const float add = symmetric ? 0.0f : *low;
    for (long start = 0; start < n; start += BLOCK) {
        const long m = n - start < BLOCK ? n - start : BLOCK;
        float* y = type == F32 ? (float*)out + start : room;
        if (symmetric) {
            add_quantized(q + start * bits / 8, bits, scale, true, y, m);
        } else if (bits == 8) {
            for (long i = 0; i < m; i++) y[i] = (float)q[start + i] * scale + add;
        } else {
            for (long i = 0; i < m; i++) {
                const int nibble = (q[(start + i) / 2] >> (i % 2 * 4)) & 15;
                y[i] = (float)nibble * scale + add;
            }
        }
        if (type != F32) narrow((char*)out + start * 2, y, type, m);
    }
}

void finish() {
#if defined(DS_AVX512) || defined(DS_AVX2)
    _mm_sfence();
#endif
}

}  // namespace

extern const Table DS_ISA;
const Table DS_ISA = {DS_NAME,    adam,         adagrad,    lion,     sgd,        lamb_moments,
                      lamb_apply, squared_norm, accumulate, quantize, dequantize, add_quantized,
                      narrow_all, finish};

}  // namespace ds
