// The module: engines and transfers, for ds_nvme/native.py.
#include <pybind11/pybind11.h>

#include <cstring>

#include "engine.h"

namespace py = pybind11;
using namespace ds;

namespace {

// An engine of a process that this one was forked from is left alone: its threads are not here to be waited for.
struct Leave {
    void operator()(Engine* engine) const {
        if (!engine->ours()) return;
        py::gil_scoped_release release;
        delete engine;
    }
};

std::shared_ptr<Transfer> start(Engine& engine, int64_t block, int file, bool write, bool direct, int64_t offset,
                                uintptr_t address, int64_t size, bool check, const std::string& sums) {
    auto transfer = std::make_shared<Transfer>();
    transfer->file = file;
    transfer->write = write;
    transfer->direct = direct;
    transfer->offset = offset;
    transfer->memory = (char*)address;
    transfer->size = size;
    transfer->block = block;
    if (direct && (offset % ALIGNMENT || address % ALIGNMENT || size % ALIGNMENT))
        throw std::invalid_argument("direct I/O needs multiples of 4096");
    if (check) {
        transfer->sums.resize((size_t)transfer->blocks());
        if (!write) {
            if (sums.size() != transfer->sums.size() * 8) throw std::invalid_argument("one sum per block is needed");
            std::memcpy(transfer->sums.data(), sums.data(), sums.size());
        }
    }
    engine.start(transfer);
    return transfer;
}

py::tuple result(Transfer& transfer) {
    static const char* const names[] = {"", "error", "ended", "changed"};
    return py::make_tuple(names[(int)transfer.failure], transfer.number, transfer.at);
}

}  // namespace

PYBIND11_MODULE(_ds_nvme, m) {
    m.attr("KINDS") = py::make_tuple("io_uring", "kernel aio", "threads");
    py::class_<Transfer, std::shared_ptr<Transfer>>(m, "Transfer")
        .def("wait", &Transfer::wait, py::call_guard<py::gil_scoped_release>())
        .def("result", &result)
        .def("sums", [](Transfer& t) { return py::bytes((const char*)t.sums.data(), t.sums.size() * 8); });
    py::class_<Engine, std::unique_ptr<Engine, Leave>>(m, "Engine")
        .def(py::init([](const std::string& kind, int64_t block, int depth, int threads, bool single, bool overlap) {
            py::gil_scoped_release release;
            return std::unique_ptr<Engine, Leave>(new Engine(kind, block, depth, threads, single, overlap));
        }))
        .def("start", &start)
        .def("close", [](Engine& engine) {
            if (!engine.ours()) return;
            py::gil_scoped_release release;
            engine.close();
        });
    m.def("checksum", [](uintptr_t at, int64_t size) {
        py::gil_scoped_release release;
        return checksum((const char*)at, size);
    });
}
