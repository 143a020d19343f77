// The limit that benchmarks/cpu_adam.py measures against: the same reads and writes as a step, and no arithmetic.
//
// Elements travel as whole numbers: what is read is combined by xor, so that nothing can be left out, and every stream
// that a step writes is written. 16-bit copies are written past the cache, as a step may do.
#include <immintrin.h>
#include <stdint.h>

namespace {
typedef __m512i V;
template <class Fn>
void parallel(long n, int threads, Fn fn) {
#pragma omp parallel for num_threads(threads) schedule(static, 1) if (threads > 1)
    for (int part = 0; part < threads; part++)
        fn(n / 32 * part / threads * 32, part + 1 == threads ? n / 32 * 32 : n / 32 * (part + 1) / threads * 32);
}
inline V get(const void* p, long byte) {
    __builtin_prefetch((const char*)p + byte + 2048);  // as the kernels do: the limit must not lack what they have
    return _mm512_loadu_si512((const char*)p + byte);
}
inline void put(void* p, long byte, V x) { _mm512_storeu_si512((char*)p + byte, x); }
}  // namespace

// `written` tensors that are read and written, one gradient that is read, all of 4 bytes.
extern "C" void limit32(int threads, long n, int written, void* g, void* a, void* b, void* c) {
    parallel(n, threads, [=](long from, long to) {
        for (long i = from * 4; i < to * 4; i += 64) {
            V x = get(g, i) ^ get(a, i);
            if (written > 1) {
                V y = get(b, i);
                put(b, i, x);
                x = x ^ y;
            }
            if (written > 2) {
                V z = get(c, i);
                put(c, i, x);
                x = x ^ z;
            }
            put(a, i, x);
        }
    });
}

// The same for `count` tensors of sizes[i] elements each, where malloc has put them; three of each are written.
extern "C" void limit32_each(int threads, long count, const long* sizes, char** g, char** a, char** b, char** c) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (long t = 0; t < count; t++)
        limit32(1, sizes[t], 3, g[t], a[t], b[t], c[t]);
}

// The mixed step: 16-bit gradients are read twice (norm, update), three fp32 tensors updated, a 16-bit copy written.
extern "C" void limit_mixed(int threads, long n, void* g, void* a, void* b, void* c, void* copy, uint64_t* sink) {
    parallel(n, threads, [=](long from, long to) {
        V all = _mm512_setzero_si512();
        for (long i = from * 2; i < to * 2; i += 64) all = all ^ get(g, i);
        sink[from % 7] = (uint64_t)_mm512_reduce_add_epi64(all);
    });
    parallel(n, threads, [=](long from, long to) {
        for (long i = from; i < to; i += 32) {
            V h = get(g, i * 2), out = h;
            for (int half = 0; half < 2; half++) {
                const long at = i * 4 + half * 64;
                V x = get(a, at) ^ h, y = get(b, at), z = get(c, at);
                put(a, at, y);
                put(b, at, z);
                put(c, at, x);
                out = out ^ x;
            }
            if ((uintptr_t)copy % 64) put(copy, i * 2, out);
            else _mm512_stream_si512((__m512i*)((char*)copy + i * 2), out);
        }
        _mm_sfence();
    });
}

// Three tensors of 2 bytes updated, a gradient of 2 bytes read.
extern "C" void limit16(int threads, long n, void* g, void* a, void* b, void* c) {
    limit32(threads, n / 2, 3, g, a, b, c);
}
