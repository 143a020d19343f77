// Operations. Few are written here: those that allocate, view and copy. All others are computed on the host.
#include "device.h"
#include "generator.h"

#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

namespace abacus {
namespace {

using at::Tensor;

// -- allocating --

c10::Device place_of(std::optional<c10::Device> device) {
  return c10::Device(kType, device && device->has_index() ? device->index() : current_device());
}

Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<c10::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(place_of(device));
  return at::detail::empty_generic(
      size, device_allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<c10::Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(place_of(device));
  return at::detail::empty_strided_generic(
      size, stride, device_allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

const Tensor& resize_(const Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(self.device());
  wait_for_device(self.device().index()); // the memory may move
  return at::native::resize_(self, size, format);
}

Tensor& set_storage(
    Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  const c10::DeviceGuard guard(self.device());
  return at::native::set_storage_cpu_(self, std::move(source), offset, size, stride);
}

// -- copying: queued on the current stream --

// The memory of `tensor` as a tensor of the host. It owns nothing.
Tensor on_host(const Tensor& tensor) {
  return at::from_blob(
      tensor.data_ptr(), tensor.sizes(), tensor.strides(), tensor.options().device(c10::DeviceType::CPU).requires_grad(false));
}

Tensor copy_from(const Tensor& self, const Tensor& dst, bool non_blocking) {
  if (dst.numel() == 0) {
    return dst;
  }
  const auto device = (dst.device().type() == kType ? dst : self).device();
  const auto stream = current_stream(device.index());
  auto from_block = block_of(self.storage()), to_block = block_of(dst.storage());
  const bool queued = from_block && to_block && // a copy from or to the host's ordinary memory ends at once
      (non_blocking || (self.device().type() == kType && dst.device().type() == kType));
  auto from = on_host(self.expand(dst.sizes())), to = on_host(dst);
  auto job = [from, to, from_block, to_block, conj = self.is_conj(), neg = self.is_neg()]() {
    const at::AutoDispatchBelowAutograd below;
    auto source = conj ? from.conj() : from;
    to.copy_(neg ? source._neg_view() : source);
  };
  if (self.device().type() == kType && self.device() != device) { // from another abacus
    block(stream, record(current_stream(self.device().index())));
  }
  if (queued) {
    enqueue(stream, std::move(job));
  } else {
    wait_for(stream);
    job();
  }
  return dst;
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& dst) {
  dst.resize_(self.sizes());
  return copy_from(self, dst, false);
}

at::Scalar local_scalar_dense(const Tensor& self) {
  wait_for(current_stream(self.device().index()));
  return at::_local_scalar_dense(on_host(self));
}

// -- computing: on the host, when the current stream has come so far --

bool is_generator(const c10::TypePtr& type) {
  return type->kind() == c10::TypeKind::GeneratorType ||
      (type->kind() == c10::TypeKind::OptionalType && type->containedTypes()[0]->kind() == c10::TypeKind::GeneratorType);
}

void compute(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& parameters = op.schema().arguments();
  auto arguments = torch::jit::last(*stack, parameters.size());
  auto index = current_device();
  for (const auto& argument : arguments) {
    if (argument.isTensor() && argument.toTensor().defined() && argument.toTensor().device().type() == kType) {
      index = argument.toTensor().device().index();
      break;
    }
  }
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (is_generator(parameters[i].real_type())) { // the host draws, from this device's sequence
      auto& value = stack->at(stack->size() - parameters.size() + i);
      value = host_generator(value.isNone() ? default_generator(index) : value.toGenerator());
    }
  }
  const c10::DeviceGuard guard(c10::Device(kType, index));
  wait_for(current_stream(index));
  at::native::cpu_fallback(op, stack);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&compute>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("resize_", TORCH_FN(resize_));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage));
  m.impl("set_.source_Storage", TORCH_FN(at::native::set_));
  m.impl("set_.source_Tensor", TORCH_FN(at::native::set_tensor_));
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("_copy_from", TORCH_FN(copy_from));
  m.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  m.impl("_local_scalar_dense", TORCH_FN(local_scalar_dense));
}

#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define WIDE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  LOWER(addmm)
  LOWER(baddbmm)
  LOWER(bmm)
  LOWER(conv2d)
  LOWER(linear)
  LOWER(matmul)
  LOWER(mm)
  LOWER(scaled_dot_product_attention)
  WIDE(cross_entropy_loss)
  WIDE(layer_norm)
  WIDE(mse_loss)
  WIDE(nll_loss)
}

// -- for Python (torch_abacus/device.py) --

Tensor rng_state(int64_t index) {
  return default_generator(index).get_state();
}

void set_rng_state(int64_t index, const Tensor& state) {
  auto generator = default_generator(index);
  generator.set_state(state);
}

void manual_seed(int64_t index, int64_t seed) {
  auto generator = default_generator(index);
  generator.set_current_seed(static_cast<uint64_t>(seed));
}

TORCH_LIBRARY(abacus, m) {
  m.def("device_count", [] { return int64_t(device_count()); });
  m.def("current_device", [] { return int64_t(current_device()); });
  m.def("set_device(int index) -> ()", [](int64_t index) { set_device(index); });
  m.def("synchronize(int index) -> ()", [](int64_t index) { wait_for_device(index); });
  m.def("memory_allocated(int index) -> int", [](int64_t index) { return allocated(index); });
  m.def("max_memory_allocated(int index) -> int", [](int64_t index) { return peak(index); });
  m.def("reset_peak_memory_stats(int index) -> ()", [](int64_t index) { reset_peak(index); });
  m.def("total_memory", [] { return total_memory(); });
  m.def("rng_state(int index) -> Tensor", rng_state);
  m.def("set_rng_state(int index, Tensor state) -> ()", set_rng_state);
  m.def("manual_seed(int index, int seed) -> ()", manual_seed);
}

} // namespace
} // namespace abacus
