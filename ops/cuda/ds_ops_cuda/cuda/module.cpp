// What Python sees: addresses and sizes, nothing of torch. The caller has checked them; see kernels.py.

#include <cuda_runtime_api.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <utility>

#include "program.h"

namespace py = pybind11;

namespace ds {
void define_program(py::module_&);  // program.cpp
}

namespace {

using ds::Address;

// Launches go to the device that torch has made current; this runtime, linked in statically, keeps its own count.
void use(int device) {
  cudaError_t error = cudaSetDevice(device);
  if (error != cudaSuccess) {
    throw std::runtime_error("device " + std::to_string(device) + ": CUDA: " + cudaGetErrorString(error));
  }
}

// `work` as a function of Python, behind two arguments more: the device and its stream.
template <class... Arguments>
auto on_device(void (*work)(Address, Arguments...)) {
  return [work](int device, Address stream, std::decay_t<Arguments>... arguments) {
    py::gil_scoped_release released;
    use(device);
    work(stream, std::move(arguments)...);
  };
}

std::pair<int, int> versions() {
  int driver = 0, runtime = 0;
  cudaDriverGetVersion(&driver);
  cudaRuntimeGetVersion(&runtime);
  return {driver, runtime};
}

using Kinds = std::tuple<int, int, int, int>;

// As on_device, for optimizer steps, whose types come as a tuple.
template <class... Arguments>
auto step(void (*work)(Address, const ds::Sizes&, ds::Types, const ds::Lists&, Arguments...)) {
  return [work](int device, Address stream, const ds::Sizes& sizes, const Kinds& kinds, const ds::Lists& lists,
                Arguments... arguments) {
    py::gil_scoped_release released;
    use(device);
    ds::Types types{std::get<0>(kinds), std::get<1>(kinds), std::get<2>(kinds), std::get<3>(kinds)};
    work(stream, sizes, types, lists, arguments...);
  };
}

void run_program(Address stream, std::shared_ptr<ds::Program> program, std::shared_ptr<ds::Frame> frame, size_t first,
                 size_t last) {
  program->run(stream, *frame, first, last);
}

}  // namespace

PYBIND11_MODULE(_ds_ops_cuda, m) {
  m.attr("CHUNK") = ds::kChunk;
  m.def("versions", versions, "CUDA of the driver (0: there is none) and of this library, as 1000 * major + 10 * minor");
  m.def("adam", step(ds::adam));
  m.def("adagrad", step(ds::adagrad));
  m.def("lion", step(ds::lion));
  m.def("sgd", step(ds::sgd));
  m.def("lamb", step(ds::lamb));
  m.def("accumulate", on_device(ds::accumulate));
  m.def("squared_norm", on_device(ds::squared_norm));
  m.def("quantize", on_device(ds::quantize));
  m.def("dequantize", on_device(ds::dequantize));
  m.def("dequantize_sum", on_device(ds::dequantize_sum));
  m.def("bias_gelu_forward", on_device(ds::bias_gelu_forward));
  m.def("bias_gelu_backward", on_device(ds::bias_gelu_backward));
  m.def("bias_dropout_add_forward", on_device(ds::bias_dropout_add_forward));
  m.def("dropout", on_device(ds::dropout));
  m.def("softmax_dropout_forward", on_device(ds::softmax_dropout_forward));
  m.def("softmax_dropout_backward", on_device(ds::softmax_dropout_backward));
  m.def("layer_norm_forward", on_device(ds::layer_norm_forward));
  m.def("layer_norm_backward", on_device(ds::layer_norm_backward));
  m.def("layer_norm_sums", on_device(ds::layer_norm_sums));
  m.def("column_sums", on_device(ds::column_sums));
  ds::define_program(m);
  m.def("run_program", on_device(run_program));
}
