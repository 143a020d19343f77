// The Python module: programs, and the instruction sets that this processor can run.
#include "../instruction_sets.h"
#include "driver/pages.h"
#include "driver/program.h"

namespace py = pybind11;
namespace di = ds::inference;
using di::chosen, di::Program, di::weight, di::Weight;

namespace {

std::vector<const di::Table*> usable() {
    std::vector<const di::Table*> tables;
#ifdef DS_X86
    if (ds::runs_avx512()) {
        if (__builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni")) tables.push_back(&di::avx512bf16);
        tables.push_back(&di::avx512);
    }
    if (ds::runs_avx2()) tables.push_back(&di::avx2);
#endif
    tables.push_back(&di::generic);
    return tables;
}

// A weight as `type`, contiguous, at `to`.
void widen(const py::tuple& from, uintptr_t to, int type, int threads) {
    const Weight w = weight(from);
    py::gil_scoped_release release;
    const long unit = std::max(1L, 16384 / std::max(1L, w.in)), units = (w.out + unit - 1) / unit;
#ifdef _OPENMP
#pragma omp parallel num_threads(threads) if (threads > 1)
#endif
    {
        std::vector<float> room((size_t)(w.in + (w.group ? 2 * w.in / w.group : 0) + 64));
#ifdef _OPENMP
#pragma omp for schedule(static)
#endif
        for (long u = 0; u < units; u++)
            chosen->widen(w, u * unit, std::min(w.out, (u + 1) * unit),
                          reinterpret_cast<char*>(to) + u * unit * w.in * (type == ds::F32 ? 4 : 2), type, room.data());
    }
}

}  // namespace

PYBIND11_MODULE(_ds_ops_cpu_inference, m) {
    ds::choose_instruction_set(m, usable(), chosen);
    m.attr("MOST_ROWS") = di::MOST_ROWS;
    py::class_<Program>(m, "Program")
        .def(py::init<std::vector<long>, int, bool>())
        .def("add", &Program::add)
        .def("begin", &Program::begin)
        .def("reserve", &Program::reserve)
        .def("arena", &Program::arena)
        .def("where", &Program::where)
        .def("rows", &Program::rows)
        .def("go", &Program::go)
        .def("complete", &Program::complete)
        .def("narrow", &Program::narrow)
        .def("has_barrier", &Program::has_barrier);
    m.def("widen", &widen);
    m.def("use_large_pages", &di::use_large_pages, py::call_guard<py::gil_scoped_release>(), py::arg("ranges"));
}
