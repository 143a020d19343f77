// Feed-forward experts on the CPU: down(act(up x)) and down(act(gate x) * up x), rows sorted by expert.
//
// Matrix products are the BLAS's that torch brings. What is gained lies between them: an expert's rows go through both
// layers while they are in the cache, the activation and its derivative are one pass each, the activated values are not
// kept but made again, and threads divide rows (forward) or the inner width (backward), so that all have equal work
// however tokens are spread. Sums are taken in an order that depends on sizes and threads only.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#ifdef __linux__
#include <sys/mman.h>
#endif

#include "tokens.h"

#define INLINE inline __attribute__((always_inline))

namespace py = pybind11;

namespace {

using Gemm = void (*)(const char*, const char*, const int*, const int*, const int*, const float*, const float*,
                      const int*, const float*, const int*, const float*, float*, const int*);
Gemm gemm = nullptr;

// All matrices are row-major: out[m, n] = a b + beta out, where a is [m, k] (or its transpose is stored), b [k, n].
void multiply(bool ta, bool tb, long m, long n, long k, const float* a, long lda, const float* b, long ldb, float beta,
              float* out, long ldo) {
    if (!m || !n) return;
    const float one = 1;
    const int im = m, in = n, ik = k, ia = lda, ib = ldb, io = ldo;
    gemm(tb ? "T" : "N", ta ? "T" : "N", &in, &im, &ik, &one, b, &ib, a, &ia, &beta, out, &io);
}

// e^x for x <= 0; 0 where that would be a denormal number.
INLINE float exponential(float given) {
    const float x = std::max(given, -87.0f);
    const float n = std::nearbyint(x * 1.44269504f);
    const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.0f / 5040;
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    const int32_t bits = (static_cast<int32_t>(n) + 127) << 23;
    float scale;
    std::memcpy(&scale, &bits, 4);
    return given < -87.0f ? 0.0f : p * scale;
}

INLINE float logistic(float x) {
    const float e = exponential(-std::fabs(x)), s = 1.0f / (1.0f + e);
    return x < 0 ? e * s : s;
}

struct Two {
    float value, slope;
};

enum Act { RELU, SILU, GELU, GELU_TANH };

template <Act act>
INLINE Two activate(float x) {
    if (act == RELU) return {x > 0 ? x : 0.0f, x > 0 ? 1.0f : 0.0f};
    if (act == SILU) {
        const float s = logistic(x);
        return {x * s, s * (1.0f + x * (1.0f - s))};
    }
    if (act == GELU_TANH) {  // x times the logistic function of 2u
        const float u = 0.797884561f * (x + 0.044715f * x * x * x), s = logistic(2.0f * u);
        return {x * s, s + x * s * (1.0f - s) * 1.595769122f * (1.0f + 0.134145f * x * x)};
    }
    // The complementary error function of z = |x| / sqrt(2) is e^(-z z) times a polynomial in t = 1 / (1 + 0.4 z), fitted
    // to 6e-8 of it on [0, 10].
    const float z = std::fabs(x) * 0.707106781f, t = 1.0f / (1.0f + 0.4f * z), e = exponential(-0.5f * x * x);
    float p = 0.04125333949923515f;
    p = p * t - 0.14032067358493805f;
    p = p * t + 0.0839901864528656f;
    p = p * t + 0.0879611074924469f;
    p = p * t + 0.0797586590051651f;
    p = p * t + 0.1933923214673996f;
    p = p * t + 0.2018878012895584f;
    p = p * t + 0.2264430820941925f;
    p = p * t + 0.22563423216342926f;
    const float tail = 0.5f * e * p * t, below = x < 0 ? tail : 1.0f - tail;
    return {x * below, below + x * e * 0.398942280f};
}

// A linear layer of every expert.
struct Linear {
    const float *w = nullptr, *b = nullptr;
    float *dw = nullptr, *db = nullptr;
    long stride = 0, bias_stride = 0;  // from expert to expert
};

struct Shape {
    long hidden, inner, out;
};

struct Rows {
    long expert, begin, count;
};

// h += bias (kept), a = act(h) [* u]; of one row.
template <Act act>
CLONES void forward_row(float* h, const float* hb, float* u, const float* ub, float* a, long n) {
    if (u) {
#pragma omp simd
        for (long i = 0; i < n; i++) {
            const float x = h[i] + (hb ? hb[i] : 0.0f), y = u[i] + (ub ? ub[i] : 0.0f);
            h[i] = x, u[i] = y, a[i] = activate<act>(x).value * y;
        }
    } else {
#pragma omp simd
        for (long i = 0; i < n; i++) {
            const float x = h[i] + (hb ? hb[i] : 0.0f);
            h[i] = x, a[i] = activate<act>(x).value;
        }
    }
}

// From h (and u) and the gradient of a (in dh): a again, dh, du; and their sums over rows.
template <Act act>
CLONES void backward_row(const float* h, const float* u, float* a, float* dh, float* du, float* hs, float* us, long n) {
    if (u) {
#pragma omp simd
        for (long i = 0; i < n; i++) {
            const Two f = activate<act>(h[i]);
            const float g = dh[i], y = u[i];
            a[i] = f.value * y, dh[i] = g * y * f.slope, du[i] = g * f.value;
            hs[i] += dh[i], us[i] += du[i];
        }
    } else {
#pragma omp simd
        for (long i = 0; i < n; i++) {
            const Two f = activate<act>(h[i]);
            a[i] = f.value, dh[i] *= f.slope, hs[i] += dh[i];
        }
    }
}

CLONES void add_row(const float* from, float* to, long n) {
#pragma omp simd
    for (long i = 0; i < n; i++) to[i] += from[i];
}

using Forward = void (*)(float*, const float*, float*, const float*, float*, long);
using Backward = void (*)(const float*, const float*, float*, float*, float*, float*, float*, long);
const Forward forwards[] = {forward_row<RELU>, forward_row<SILU>, forward_row<GELU>, forward_row<GELU_TANH>};
const Backward backwards[] = {backward_row<RELU>, backward_row<SILU>, backward_row<GELU>, backward_row<GELU_TANH>};

using Buffer = std::unique_ptr<float[]>;
Buffer room(long n) { return Buffer(new float[std::max(n, 1L)]); }

// In pieces of at most `most` rows, each expert's of about equal size.
std::vector<Rows> pieces(const std::vector<long>& sizes, long most) {
    std::vector<Rows> found;
    long row = 0;
    for (size_t e = 0; e < sizes.size(); e++) {
        const long n = sizes[e], parts = (n + most - 1) / most;
        for (long p = 0; p < parts; p++)
            found.push_back({static_cast<long>(e), row + n * p / parts, n * (p + 1) / parts - n * p / parts});
        row += n;
    }
    return found;
}

void forward(const float* x, float* y, float* h, float* u, const Linear& first, const Linear& second, const Linear& down,
             const std::vector<long>& sizes, Shape s, Act act, long most, int threads) {
    std::vector<Rows> work = pieces(sizes, most);
    std::stable_sort(work.begin(), work.end(), [](const Rows& a, const Rows& b) { return a.count > b.count; });
    const Forward row = forwards[act];
#pragma omp parallel num_threads(threads)
    {
        Buffer a = room(most * s.inner);
#pragma omp for schedule(dynamic, 1)
        for (size_t i = 0; i < work.size(); i++) {
            const auto [e, begin, n] = work[i];
            float *hr = h + begin * s.inner, *ur = u ? u + begin * s.inner : nullptr, *yr = y + begin * s.out;
            const float* xr = x + begin * s.hidden;
            multiply(false, true, n, s.inner, s.hidden, xr, s.hidden, first.w + e * first.stride, s.hidden, 0, hr, s.inner);
            if (ur)
                multiply(false, true, n, s.inner, s.hidden, xr, s.hidden, second.w + e * second.stride, s.hidden, 0, ur,
                         s.inner);
            const float* hb = first.b ? first.b + e * first.bias_stride : nullptr;
            const float* ub = second.b ? second.b + e * second.bias_stride : nullptr;
            for (long r = 0; r < n; r++)
                row(hr + r * s.inner, hb, ur ? ur + r * s.inner : nullptr, ub, a.get() + r * s.inner, s.inner);
            if (down.b)
                for (long r = 0; r < n; r++)
                    std::memcpy(yr + r * s.out, down.b + e * down.bias_stride, s.out * sizeof(float));
            multiply(false, true, n, s.out, s.inner, a.get(), s.inner, down.w + e * down.stride, s.inner, down.b ? 1 : 0, yr,
                     s.out);
        }
    }
}

// Columns [begin, end) of `n` for part i of `parts`, in steps of 16 (a cache line).
std::pair<long, long> columns(long n, long i, long parts) {
    const long lines = (n + 15) / 16;
    return {std::min(n, lines * i / parts * 16), std::min(n, lines * (i + 1) / parts * 16)};
}

// dx, and the gradients of all weights. Threads share each piece: first by columns of the inner width (values and slopes,
// gradients of the weights, for which columns are independent), then, after a barrier, by rows (dx).
void backward(const float* x, const float* gy, float* dx, const float* h, const float* u, const Linear& first,
              const Linear& second, const Linear& down, const std::vector<long>& sizes, Shape s, Act act, long most,
              long wide, int threads) {
    const Backward row = backwards[act];
    const std::vector<Rows> work = pieces(sizes, most);
    const long width = s.inner, slices = ((width + wide - 1) / wide + threads - 1) / threads * threads;
    // Two of each, so that one barrier per piece is enough.
    Buffer dh[2] = {room(most * width), room(most * width)};
    Buffer du[2] = {room(u ? most * width : 0), room(u ? most * width : 0)};
    for (size_t e = 0; e < sizes.size(); e++) {
        if (first.db) std::fill_n(first.db + e * first.bias_stride, width, 0.0f);
        if (second.db) std::fill_n(second.db + e * second.bias_stride, width, 0.0f);
        if (down.db) std::fill_n(down.db + e * down.bias_stride, s.out, 0.0f);
        if (sizes[e]) continue;
        if (first.dw) std::fill_n(first.dw + e * first.stride, width * s.hidden, 0.0f);
        if (second.dw) std::fill_n(second.dw + e * second.stride, width * s.hidden, 0.0f);
        if (down.dw) std::fill_n(down.dw + e * down.stride, s.out * width, 0.0f);
    }
#pragma omp parallel num_threads(threads)
    {
        Buffer a = room(most * (width / slices + 32)), sums = room(2 * width);
        for (size_t i = 0; i < work.size(); i++) {
            const auto [e, begin, n] = work[i];
            const float more = i && work[i - 1].expert == e ? 1 : 0;  // add to what the expert's rows so far gave
            const float *gr = gy + begin * s.out, *xr = x + begin * s.hidden, *hr = h + begin * width;
            const float* ur = u ? u + begin * width : nullptr;
            float *dhr = dh[i % 2].get(), *dur = u ? du[i % 2].get() : nullptr;
#pragma omp for schedule(static)
            for (long k = 0; k < slices; k++) {
                const auto [from, to] = columns(width, k, slices);
                const long m = to - from;
                if (!m) continue;
                multiply(false, false, n, m, s.out, gr, s.out, down.w + e * down.stride + from, width, 0, dhr + from, width);
                std::fill_n(sums.get(), 2 * m, 0.0f);
                for (long r = 0; r < n; r++)
                    row(hr + r * width + from, ur ? ur + r * width + from : nullptr, a.get() + r * m,
                        dhr + r * width + from, dur ? dur + r * width + from : nullptr, sums.get(), sums.get() + m, m);
                if (first.db) add_row(sums.get(), first.db + e * first.bias_stride + from, m);
                if (second.db) add_row(sums.get() + m, second.db + e * second.bias_stride + from, m);
                if (down.dw)
                    multiply(true, false, s.out, m, n, gr, s.out, a.get(), m, more, down.dw + e * down.stride + from, width);
                if (first.dw)
                    multiply(true, false, m, s.hidden, n, dhr + from, width, xr, s.hidden, more,
                             first.dw + e * first.stride + from * s.hidden, s.hidden);
                if (second.dw)
                    multiply(true, false, m, s.hidden, n, dur + from, width, xr, s.hidden, more,
                             second.dw + e * second.stride + from * s.hidden, s.hidden);
            }
            // Here all threads have met.
#pragma omp for schedule(static) nowait
            for (long k = 0; k < threads; k++) {
                const auto [left, right] = columns(s.out, k, threads);
                if (down.db && right > left)
                    for (long r = 0; r < n; r++)
                        add_row(gr + r * s.out + left, down.db + e * down.bias_stride + left, right - left);
                const long low = n * k / threads, high = n * (k + 1) / threads;
                if (!dx || low == high) continue;
                float* to = dx + (begin + low) * s.hidden;
                multiply(false, false, high - low, s.hidden, width, dhr + low * width, width, first.w + e * first.stride,
                         s.hidden, 0, to, s.hidden);
                if (dur)
                    multiply(false, false, high - low, s.hidden, width, dur + low * width, width,
                             second.w + e * second.stride, s.hidden, 1, to, s.hidden);
            }
        }
    }
}

// Ask for huge pages in memory that nobody has touched yet: for 64 MB of gradients 16,000 faults take as long as the rest.
void huge(uintptr_t address, long bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    const uintptr_t page = 4096, begin = (address + page - 1) / page * page, end = (address + bytes) / page * page;
    if (end > begin) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

// -- Python ------------------------------------------------------------------------------------------------------------

float* at(uintptr_t address) { return reinterpret_cast<float*>(address); }
int64_t* numbers(uintptr_t address) { return reinterpret_cast<int64_t*>(address); }

// (weight, bias, its gradients, strides from expert to expert); addresses are 0 for what is not there.
using Given = std::tuple<uintptr_t, uintptr_t, uintptr_t, uintptr_t, long, long>;

Linear linear(const Given& given) {
    const auto& [w, b, dw, db, stride, bias_stride] = given;
    return {at(w), at(b), at(dw), at(db), stride, bias_stride};
}

}  // namespace

PYBIND11_MODULE(_ds_moe, m) {
    m.def("use_gemm", [](uintptr_t address) { gemm = reinterpret_cast<Gemm>(address); });
    m.def("huge", &huge);
    m.def("count", [](uintptr_t experts, long choices, long num, uintptr_t counts) {
        return count(numbers(experts), choices, num, numbers(counts));
    });
    m.def("plan", [](uintptr_t experts, long tokens, long k, long num, uintptr_t counts, uintptr_t order, uintptr_t rows,
                     uintptr_t choices, uintptr_t places, uintptr_t begins) {
        plan(numbers(experts), tokens, k, num, numbers(counts), numbers(order), numbers(rows), numbers(choices),
             numbers(places), numbers(begins));
    });
    m.def("sums", [](uintptr_t y, uintptr_t places, uintptr_t begins, uintptr_t weights, uintptr_t out, long tokens,
                     long count, long width, int threads) {
        py::gil_scoped_release release;
        sums(at(y), numbers(places), numbers(begins), at(weights), at(out), tokens, count, width, threads);
    });
    m.def("weigh_back", [](uintptr_t grad, uintptr_t y, uintptr_t weights, uintptr_t rows, uintptr_t order,
                           uintptr_t of_y, uintptr_t of_weights, long count, long width, int threads) {
        py::gil_scoped_release release;
        weigh_back(at(grad), at(y), at(weights), numbers(rows), numbers(order), at(of_y), at(of_weights), count, width,
                   threads);
    });
    m.def("forward", [](uintptr_t x, uintptr_t y, uintptr_t h, uintptr_t u, Given first, Given second, Given down,
                        std::vector<long> sizes, std::tuple<long, long, long> shape, int act, long most, int threads) {
        const auto [hidden, inner, out] = shape;
        py::gil_scoped_release release;
        forward(at(x), at(y), at(h), at(u), linear(first), linear(second), linear(down), sizes, {hidden, inner, out},
                static_cast<Act>(act), most, threads);
    });
    m.def("backward", [](uintptr_t x, uintptr_t gy, uintptr_t dx, uintptr_t h, uintptr_t u, Given first, Given second,
                         Given down, std::vector<long> sizes, std::tuple<long, long, long> shape, int act, long most,
                         long wide, int threads) {
        const auto [hidden, inner, out] = shape;
        py::gil_scoped_release release;
        backward(at(x), at(gy), at(dx), at(h), at(u), linear(first), linear(second), linear(down), sizes,
                 {hidden, inner, out}, static_cast<Act>(act), most, wide, threads);
    });
}
