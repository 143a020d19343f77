// Inference programs as Python sees them: it builds one from addresses and numbers, and runs ranges of its launches.

#include "program.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>

namespace py = pybind11;

namespace ds {

void define_program(py::module_& m) {
  py::class_<Matrix>(m, "Matrix")
      .def(py::init([](Address data, Address scales, Address lows, int kind, int64_t out, int64_t in, int64_t group,
                       bool columns) {
        return Matrix{data, scales, lows, kind, out, in, group, columns};
      }));
  py::class_<Part>(m, "Part").def(
      py::init([](const Matrix& weight, Vector bias, int out) { return Part{weight, bias, out}; }));
  py::class_<Turn>(m, "Turn").def(py::init([](int x, int64_t heads, int64_t head_dim, int64_t pairs, Address cos,
                                              Address sin, int64_t positions, bool halves) {
    return Turn{x, heads, head_dim, pairs, cos, sin, positions, halves};
  }));
  py::class_<Register>(m, "Register").def(py::init([](Address data, int64_t stride) { return Register{data, stride}; }));
  py::class_<Frame, std::shared_ptr<Frame>>(m, "Frame")
      .def(py::init<>())
      .def_readwrite("type", &Frame::type)
      .def_readwrite("rows", &Frame::rows)
      .def_readwrite("kept", &Frame::kept)
      .def_readwrite("registers", &Frame::registers)
      .def_readwrite("tokens", &Frame::tokens)
      .def_readwrite("positions", &Frame::positions)
      .def_readwrite("types", &Frame::types)
      .def_readwrite("wanted", &Frame::wanted)
      .def_readwrite("embeds", &Frame::embeds)
      .def_readwrite("sequence", &Frame::sequence)
      .def_readwrite("limit", &Frame::limit)
      .def_readwrite("length", &Frame::length)
      .def_readwrite("first", &Frame::first)
      .def_readwrite("blocks", &Frame::blocks)
      .def_readwrite("most", &Frame::most)
      .def_readwrite("keys", &Frame::keys)
      .def_readwrite("values", &Frame::values)
      .def_readwrite("cache_type", &Frame::cache_type)
      .def_readwrite("cache_blocks", &Frame::cache_blocks)
      .def_readwrite("attended", &Frame::attended)
      .def_readwrite("attended_rows", &Frame::attended_rows)
      .def_readwrite("scratch", &Frame::scratch);
  py::class_<Program, std::shared_ptr<Program>>(m, "Program")
      .def(py::init<int64_t>(), py::arg("blocks"))
      .def("__len__", [](const Program& p) { return p.launches.size(); })
      .def("embed",
           [](Program& p, int out, int64_t width, Vector table, int64_t entries, int by, int64_t offset, double scale,
              bool add) { p.launches.push_back(embed(out, width, table, entries, by, offset, scale, add)); })
      .def("normalize",
           [](Program& p, int x, int out, int64_t width, int64_t groups, Vector weight, Vector bias, double eps,
              bool layer, bool kept) {
             p.launches.push_back(normalize(x, out, width, groups, weight, bias, eps, layer, kept));
           })
      .def("place",
           [](Program& p, const std::vector<Turn>& turns, int k, int v, int64_t kv_heads, int64_t head_dim,
              int64_t layer) { p.launches.push_back(place(turns, k, v, kv_heads, head_dim, layer)); })
      .def("attend",
           [](Program& p, int q, int k, int v, int out, int64_t heads, int64_t kv_heads, int64_t head_dim, double scale,
              int64_t layer, bool causal, int64_t window, Address slopes, Address heads_of, int64_t tasks,
              int per_task) {
             Attention a{q, k, v, out, heads, kv_heads, head_dim, scale, layer, causal, window, slopes, heads_of, tasks,
                         per_task};
             p.launches.push_back(attend(a, p.blocks));
           })
      .def("products",
           [](Program& p, int x, const std::vector<Part>& parts, bool gated, int activation, int added, bool kept) {
             p.launches.push_back(products(x, parts, gated, activation, added, kept));
           })
      .def("experts",
           [](Program& p, int x, int out, const Matrix& router, const Matrix& gate, const Matrix& up,
              const Matrix& down, Address table, int64_t here, int64_t first, int64_t top_k, bool normalize,
              int activation, bool kept) {
             MixtureOfExperts e{x, out, router, gate, up, down, table, here, first, top_k, normalize, activation};
             p.launches.push_back(experts(e, kept));
           })
      .def("add",
           [](Program& p, int x, int y, int out, int64_t width, Vector bias, bool kept) {
             p.launches.push_back(add(x, y, out, width, bias, kept));
           })
      .def("columns",
           [](Program& p, int x, int out, int64_t width, int64_t first, int64_t groups, int64_t part, bool kept) {
             p.launches.push_back(columns(x, out, width, first, groups, part, kept));
           })
      .def("keep", [](Program& p, int x, int out, int64_t width) { p.launches.push_back(keep(x, out, width)); });
  m.def("describe_rows", [](Address starts, Address lengths, int64_t sequences, Address out) {
    describe_rows(reinterpret_cast<const int32_t*>(starts), reinterpret_cast<const int32_t*>(lengths), sequences,
                  reinterpret_cast<int32_t*>(out));
  });
}

}  // namespace ds
