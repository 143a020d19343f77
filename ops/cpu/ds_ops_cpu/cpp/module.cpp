// What Python calls: lists of tensors as lists of addresses and sizes, one call for all tensors of a step.
//
// The work of a call is laid end to end and cut into equal parts, one per thread, across the borders of tensors; so a
// thousand small tensors cost what one large one does. Parts begin at whole blocks, and sums are kept per block and
// added in order, so no result depends on the number of threads.
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#ifdef _OPENMP
#include <omp.h>
#endif

#include "instruction_sets.h"
#include "ops.h"
#include "tensors.h"
#include "together.h"

namespace py = pybind11;
using ds::Addresses, ds::Sizes, ds::Tensors, ds::width;

void register_shared(py::module_& m);  // shared.cpp

namespace {

const ds::Table* chosen = nullptr;

std::vector<const ds::Table*> usable() {
    std::vector<const ds::Table*> tables;
#ifdef DS_X86
    if (ds::runs_avx512()) tables.push_back(&ds::avx512);
    if (ds::runs_avx2()) tables.push_back(&ds::avx2);
#endif
    tables.push_back(&ds::generic);
    return tables;
}

// -- dividing the work ---------------------------------------------------------------------------------------------------

// What starting a block costs, in elements: keeps a part with many tiny tensors from being the slow one.
constexpr long START = 64;
// Elements that are worth waking a thread for.
constexpr long WORTH = 32768;
// Elements that one thread takes at a time while more are prepared.
constexpr long PORTION = 65536;

struct Place {
    size_t tensor;
    long block;
};

class Layout {
  public:
    explicit Layout(const Sizes& sizes, long block = ds::BLOCK)
        : sizes_(sizes), block_(block), cost_(sizes.size() + 1), first_(sizes.size() + 1) {
        for (size_t i = 0; i < sizes.size(); i++) {
            const long blocks = (sizes[i] + block - 1) / block;
            cost_[i + 1] = cost_[i] + sizes[i] + START * blocks;
            first_[i + 1] = first_[i] + blocks;
        }
    }

    size_t blocks() const { return (size_t)first_.back(); }

    // fn(tensor, offset, elements, number of the block), for every block, on up to `threads` threads.
    template <class Fn>
    void run(int threads, const Fn& fn) const {
        const int parts = (int)std::max(1L, std::min((long)threads, cost_.back() / WORTH));
#ifdef _OPENMP
#pragma omp parallel for num_threads(parts) schedule(static, 1) if (parts > 1)
#endif
        for (int part = 0; part < parts; part++) run_part(part, parts, fn);
    }

    // As many parts as there are portions of PORTION elements.
    int portions() const { return (int)std::max(1L, cost_.back() / PORTION); }

    template <class Fn>
    void run_part(int part, int parts, const Fn& fn) const {
        const long total = cost_.back();
        walk(locate(total / parts * part + total % parts * part / parts),
             part + 1 == parts ? Place{sizes_.size(), 0}
                               : locate(total / parts * (part + 1) + total % parts * (part + 1) / parts),
             fn);
        chosen->finish();
    }

  private:
    Place locate(long cost) const {
        const size_t tensor = (size_t)(std::upper_bound(cost_.begin(), cost_.end(), cost) - cost_.begin()) - 1;
        if (tensor >= sizes_.size()) return {sizes_.size(), 0};
        return {tensor, (cost - cost_[tensor]) / (block_ + START)};
    }

    template <class Fn>
    void walk(Place from, Place to, const Fn& fn) const {
        for (size_t t = from.tensor; t < sizes_.size() && t <= to.tensor; t++) {
            const long begin = t == from.tensor ? from.block : 0;
            const long all = first_[t + 1] - first_[t], end = t == to.tensor ? std::min(to.block, all) : all;
            for (long b = begin; b < end; b++) {
                const long offset = b * block_;
                fn(t, offset, std::min(block_, sizes_[t] - offset), first_[t] + b);
            }
        }
    }

    const Sizes& sizes_;
    const long block_;
    std::vector<long> cost_, first_;
};

// -- optimizer steps -------------------------------------------------------------------------------------------------------

// Below this many bytes a copy that is written out is read again from the cache; above it would only push others out.
constexpr long STREAM_FROM = 8L << 20;

// The operands of a step: parameters, gradients, up to two states, and with `copies` what the last list of `tensors` is.
struct Operands {
    const Sizes& sizes;
    const Addresses *params, *grads, *first = nullptr, *second = nullptr, *copies = nullptr;
    ds::Types types;

    Operands(const Tensors& from, bool has_copies, size_t most_states) : sizes(from.sizes) {
        const size_t states = from.lists.size() - (has_copies ? 3 : 2);
        if (from.lists.size() < (has_copies ? 3u : 2u) || states > most_states)
            throw py::value_error(std::to_string(from.lists.size()) + " lists of tensors are not what this step takes");
        params = &from.lists[0];
        grads = &from.lists[1];
        if (states > 0) first = &from.lists[2];
        if (states > 1) second = &from.lists[3];
        if (has_copies) copies = &from.lists.back();
        long total = 0;
        for (long size : sizes) total += size;
        types = {from.type(0), from.type(1), states ? from.type(2) : ds::NONE,
                 has_copies ? from.type(states + 2) : ds::NONE, total * 2 >= STREAM_FROM};
        const bool wide = types.param == ds::F64 || types.grad == ds::F64 || types.state == ds::F64;
        if (wide || (states > 1 && from.type(3) != types.state) || types.copy == ds::F32 || types.copy == ds::F64)
            throw py::value_error("no path for tensors of these types");
    }

    ds::Block block(size_t t, long offset, long n) const {
        return {(*params)[t] + offset * width(types.param),
                (*grads)[t] + offset * width(types.grad),
                first ? (*first)[t] + offset * width(types.state) : nullptr,
                second ? (*second)[t] + offset * width(types.state) : nullptr,
                copies ? (*copies)[t] + offset * width(types.copy) : nullptr,
                n};
    }

    // The hardware finds the streams of the next tensor only when it is there.
    void expect(size_t t) const {
        if (t >= sizes.size() || !sizes[t]) return;
        for (auto list : {params, grads, first, second})  // for good: where a page is new, prefetching does nothing
            if (list) (void)*const_cast<volatile char*>((*list)[t]);
        for (long at = 0; at < std::min(2048L, sizes[t] * 4); at += 64) {
            __builtin_prefetch((*params)[t] + at);
            __builtin_prefetch((*grads)[t] + at);
            if (first) __builtin_prefetch((*first)[t] + at);
            if (second) __builtin_prefetch((*second)[t] + at);
        }
    }
};

template <class Factors>
void step(int threads, const Operands& operands, void (*kernel)(const ds::Block&, const ds::Types&, const Factors&),
          const Factors& factors) {
    const auto update = [=](size_t t, long offset, long n, long) {
        const long last = offset + n == operands.sizes[t] ? (n - 1) / ds::BLOCK * ds::BLOCK : n;
        if (last) kernel(operands.block(t, offset, last), operands.types, factors);
        if (last == n) return;
        operands.expect(t + 1);
        kernel(operands.block(t, offset + last, n - last), operands.types, factors);
    };
    if (threads == 0) {
        const auto together = ds::Together::current();
        if (!together) throw py::value_error("no threads, and nobody to hand the work to");
        const auto layout = std::make_shared<const Layout>(operands.sizes, ds::SPAN);
        for (int part = 0, parts = layout->portions(); part < parts; part++)
            together->give([=] { layout->run_part(part, parts, update); });
        return;
    }
    py::gil_scoped_release release;
    Layout(operands.sizes, ds::SPAN).run(threads, update);
}

// Calls `prepare`, and has done all the steps that it has asked for with no threads of their own when it returns. What
// they were given must be kept until then.
void together(int threads, const py::function& prepare) {
    ds::Together work;
    std::exception_ptr error;
#ifdef _OPENMP
#pragma omp parallel num_threads(threads)
#endif
    {
#ifdef _OPENMP
        const bool first = omp_get_thread_num() == 0;
#else
        const bool first = true;
#endif
        if (first) {
            const auto before = std::exchange(ds::Together::current(), &work);
            try {
                prepare();
            } catch (...) {
                error = std::current_exception();
            }
            ds::Together::current() = before;
            work.close();
            py::gil_scoped_release release;
            work.work();
        } else {
            work.work();
        }
    }
    if (error) std::rethrow_exception(error);
}

void adam(int threads, const Tensors& tensors, bool copies, double scale, double lr, double beta1, double beta2,
          double eps, double weight_decay, bool decoupled, double correction1, double correction2) {
    const ds::AdamFactors c = {(float)scale,
                               (float)(decoupled ? 0 : weight_decay),
                               (float)(decoupled ? 1 - lr * weight_decay : 1),
                               (float)(1 - beta1),
                               (float)beta2,
                               (float)(1 - beta2),
                               (float)(1 / std::sqrt(correction2)),
                               (float)eps,
                               (float)(lr / correction1)};
    step(threads, Operands(tensors, copies, 2), chosen->adam, c);
}

void adagrad(int threads, const Tensors& tensors, bool copies, double scale, double lr, double eps,
             double weight_decay) {
    const ds::AdagradFactors c = {(float)scale, (float)weight_decay, (float)eps, (float)lr};
    step(threads, Operands(tensors, copies, 1), chosen->adagrad, c);
}

void lion(int threads, const Tensors& tensors, bool copies, double scale, double lr, double beta1, double beta2,
          double weight_decay) {
    const ds::LionFactors c = {(float)scale, (float)(1 - lr * weight_decay), (float)(1 - beta1), (float)(1 - beta2),
                               (float)lr};
    step(threads, Operands(tensors, copies, 1), chosen->lion, c);
}

void sgd(int threads, const Tensors& tensors, bool copies, double scale, double lr, double momentum, double fresh,
         double weight_decay, bool nesterov, bool first) {
    const ds::SgdFactors c = {(float)scale, (float)weight_decay, (float)momentum, (float)fresh, (float)lr, nesterov,
                              first};
    step(threads, Operands(tensors, copies, 1), chosen->sgd, c);
}

std::vector<double> sums_per_tensor(const Sizes& sizes, const std::vector<double>& of_blocks) {
    std::vector<double> sums(sizes.size());
    size_t block = 0;
    for (size_t t = 0; t < sizes.size(); t++)
        for (long left = sizes[t]; left > 0; left -= ds::BLOCK) sums[t] += of_blocks[block++];
    return sums;
}

py::list lamb(int threads, const Tensors& all, bool copies, double scale, double step_size, double beta1, double beta2,
              double eps, bool eps_inside, double weight_decay, double min_coeff, double max_coeff) {
    const Operands tensors(all, copies, 2);
    const ds::LambFactors c = {(float)scale,       (float)beta1, (float)(1 - beta1),  (float)beta2,
                               (float)(1 - beta2), (float)eps,   (float)weight_decay, eps_inside};
    std::vector<double> coeffs;
    {
        py::gil_scoped_release release;
        const Layout layout(tensors.sizes);
        std::vector<double> param_norms(layout.blocks()), update_norms(layout.blocks());
        layout.run(threads, [&](size_t t, long offset, long n, long b) {
            chosen->lamb_moments(tensors.block(t, offset, n), tensors.types, c, &param_norms[(size_t)b],
                                 &update_norms[(size_t)b]);
        });
        coeffs = sums_per_tensor(tensors.sizes, param_norms);
        const auto updates = sums_per_tensor(tensors.sizes, update_norms);
        for (size_t t = 0; t < coeffs.size(); t++) {
            const double whole = std::sqrt(coeffs[t]), change = std::sqrt(updates[t]);
            coeffs[t] = whole == 0 || change == 0 ? 1 : std::min(std::max(whole / change, min_coeff), max_coeff);
        }
        layout.run(threads, [&](size_t t, long offset, long n, long) {
            chosen->lamb_apply(tensors.block(t, offset, n), tensors.types, c, (float)(step_size * coeffs[t]));
        });
    }
    py::list out;
    for (double coeff : coeffs) out.append(coeff);
    return out;
}

// -- the rest -----------------------------------------------------------------------------------------------------------------

double squared_norm(int threads, const Tensors& tensors) {
    py::gil_scoped_release release;
    const Layout layout(tensors.sizes);
    std::vector<double> sums(layout.blocks());
    const auto& types = tensors.types[0];
    layout.run(threads, [&](size_t t, long offset, long n, long b) {
        const int type = types[types.size() > 1 ? t : 0];
        sums[(size_t)b] = chosen->squared_norm(tensors.lists[0][t] + offset * width(type), type, n);
    });
    double all = 0;
    for (double sum : sums) all += sum;
    return all;
}

// lists: what is added to, in fp32, and what is added.
void accumulate(int threads, const Tensors& tensors, double scale) {
    const int type = tensors.type(1);
    if (tensors.lists.size() != 2 || tensors.type(0) != ds::F32 || type == ds::F64)
        throw py::value_error("two lists are needed, the first of fp32");
    py::gil_scoped_release release;
    Layout(tensors.sizes).run(threads, [&](size_t t, long offset, long n, long) {
        chosen->accumulate((float*)tensors.lists[0][t] + offset, tensors.lists[1][t] + offset * width(type), type,
                           (float)scale, n);
    });
}

// Groups of one tensor, as many threads as there is work for.
template <class Fn>
void groups_of(int threads, long n, long group, const Fn& fn) {
    const long groups = (n + group - 1) / group;
    const int parts = (int)std::max(1L, std::min((long)threads, n / WORTH));
#ifdef _OPENMP
#pragma omp parallel for num_threads(parts) schedule(static) if (parts > 1)
#endif
    for (long i = 0; i < groups; i++) fn(i, std::min(group, n - i * group));
}

void quantize(int threads, long n, int type, uintptr_t x, long group, int bits, bool symmetric, uintptr_t out,
              uintptr_t scales, uintptr_t lows) {
    py::gil_scoped_release release;
    groups_of(threads, n, group, [&](long i, long m) {
        chosen->quantize((char*)x + i * group * width(type), type, m, bits, symmetric, (char*)out + i * group * bits / 8,
                         (float*)scales + i, lows ? (float*)lows + i : nullptr);
    });
}

void dequantize(int threads, long n, int type, uintptr_t out, long group, int bits, uintptr_t q, uintptr_t scales,
                uintptr_t lows) {
    py::gil_scoped_release release;
    groups_of(threads, n, group, [&](long i, long m) {
        chosen->dequantize((char*)q + i * group * bits / 8, bits, ((float*)scales)[i], lows ? (float*)lows + i : nullptr,
                           (char*)out + i * group * width(type), type, m);
    });
}

// The sum of `rows` quantised tensors, group by group: as values of `type`, or quantised again where there are scales.
void dequantize_sum(int threads, long n, long group, int bits, long rows, uintptr_t q, long q_step, uintptr_t scales,
                    long scales_step, int type, uintptr_t out, uintptr_t out_scales) {
    py::gil_scoped_release release;
    groups_of(threads, n, group, [&](long i, long m) {
        static thread_local std::vector<float> room;
        const bool direct = !out_scales && type == ds::F32;
        if (!direct && (long)room.size() < m) room.resize((size_t)m);
        float* sum = direct ? (float*)out + i * group : room.data();
        if (rows == 0) std::fill(sum, sum + m, 0.0f);
        for (long row = 0; row < rows; row++)
            chosen->add_quantized((char*)q + row * q_step + i * group * bits / 8, bits,
                                  ((float*)(scales + (uintptr_t)(row * scales_step)))[i], row == 0, sum, m);
        if (out_scales)
            chosen->quantize(sum, ds::F32, m, bits, true, (char*)out + i * group * bits / 8, (float*)out_scales + i, nullptr);
        else if (!direct)
            chosen->narrow((char*)out + i * group * width(type), sum, type, m);
    });
}

}  // namespace

PYBIND11_MODULE(_ds_ops_cpu, m) {
    ds::choose_instruction_set(m, usable(), chosen);
    m.attr("BLOCK") = ds::BLOCK;
#ifdef _OPENMP
    m.attr("OPENMP") = true;
#else
    m.attr("OPENMP") = false;
#endif
    register_shared(m);
    py::class_<Tensors>(m, "Tensors");
    m.def("from_numbers", &ds::from_numbers);
    m.def("from_tensors", &ds::from_tensors);
    m.def("together", &together);
    m.def("adam", &adam);
    m.def("adagrad", &adagrad);
    m.def("lion", &lion);
    m.def("sgd", &sgd);
    m.def("lamb", &lamb);
    m.def("squared_norm", &squared_norm);
    m.def("accumulate", &accumulate);
    m.def("quantize", &quantize);
    m.def("dequantize_sum", &dequantize_sum);
    m.def("dequantize", &dequantize);
}
