// What torch asks of a device: the guard (current device, streams, events) and the hooks (memory, generators).
#include "device.h"
#include "generator.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstdlib>

namespace abacus {
namespace {

thread_local c10::DeviceIndex chosen = 0;

Marks& mark_of(void* event) {
  return *static_cast<Marks*>(event);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return kType;
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override {
    return c10::Device(kType, chosen);
  }
  void setDevice(c10::Device device) const override {
    set_device(device.has_index() ? device.index() : chosen);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    chosen = device.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return device_count();
  }

  c10::Stream getStream(c10::Device device) const override {
    return current_stream(device.has_index() ? device.index() : chosen);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::UNSAFE, device, 0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return new_stream(device.has_index() ? device.index() : chosen);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return exchange_stream(stream);
  }
  bool queryStream(const c10::Stream& stream) const override {
    return is_idle(stream);
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    wait_for(stream);
  }
  void synchronizeDevice(const c10::DeviceIndex index) const override {
    wait_for_device(index);
  }

  // An event is the Mark of its last recording; one that was never recorded is done.
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    auto mark = abacus::record(stream);
    if (*event == nullptr) {
      *event = new Marks(std::move(mark));
    } else {
      mark_of(*event) = std::move(mark);
    }
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) {
      abacus::block(stream, mark_of(event));
    }
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || is_done(mark_of(event));
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) {
      wait_for(mark_of(event));
    }
  }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    return milliseconds(mark_of(from), mark_of(to));
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Marks*>(event);
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return device_count() > 0;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true; // there is nothing to initialize
  }
  c10::DeviceIndex deviceCount() const override {
    return device_count();
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return chosen;
  }
  void setCurrentDevice(c10::DeviceIndex index) const override {
    set_device(index);
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    const auto before = chosen;
    set_device(index);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return index < 0 ? chosen : exchangeDevice(index);
  }
  bool isPinnedPtr(const void* address) const override {
    return is_pinned(address);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return pinned_allocator();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(storage, bytes);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    return default_generator(index < 0 ? chosen : index);
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return new_generator(index < 0 ? chosen : index);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)
REGISTER_ALLOCATOR(kType, device_allocator())
[[maybe_unused]] const bool hooked = (at::RegisterPrivateUse1HooksInterface(new Hooks()), true);

} // namespace

c10::DeviceIndex device_count() {
  static const int count = std::getenv("ABACUS_DEVICES") ? std::atoi(std::getenv("ABACUS_DEVICES")) : 2;
  return static_cast<c10::DeviceIndex>(std::clamp(count, 0, 64));
}

c10::DeviceIndex current_device() {
  return chosen;
}

void set_device(c10::DeviceIndex index) {
  TORCH_CHECK(index >= 0 && index < device_count(), "there is no abacus:", int(index), "; there are ", int(device_count()));
  chosen = index;
}

} // namespace abacus
