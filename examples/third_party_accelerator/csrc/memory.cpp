// Memory: blocks that are counted per device, and pinned blocks, from which and to which streams copy by themselves.
#include "device.h"

#include <c10/util/Exception.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

namespace abacus {
namespace {

struct Counter {
  std::atomic<int64_t> now{0}, peak{0};
};

std::array<Counter, 64> counters;
std::mutex pinned_mutex;
std::map<uintptr_t, size_t>& pinned() {
  static auto* blocks = new std::map<uintptr_t, size_t>(); // never freed: blocks may outlive main()
  return *blocks;
}

} // namespace

// Kept alive by the storage that was given it, and by the copies that are queued.
struct Block {
  Block(size_t bytes, int device) : bytes(bytes), device(device) {
    if (device >= 0) {
      auto& counter = counters.at(device);
      const auto now = counter.now += static_cast<int64_t>(bytes);
      if (now > total_memory()) {
        counter.now -= static_cast<int64_t>(bytes);
        TORCH_CHECK_WITH(
            OutOfMemoryError, false, "abacus:", device, " is out of memory: ", bytes, " bytes asked for, ",
            total_memory() - counter.now, " of ", total_memory(), " free (ABACUS_MEMORY_MIB)");
      }
      for (auto seen = counter.peak.load(); seen < now && !counter.peak.compare_exchange_weak(seen, now);) {
      }
    }
    address = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
    TORCH_CHECK(address != nullptr, "the host has no ", bytes, " bytes left");
    if (device < 0) {
      std::lock_guard<std::mutex> lock(pinned_mutex);
      pinned()[reinterpret_cast<uintptr_t>(address)] = bytes;
    }
  }

  ~Block() {
    if (device >= 0) {
      counters.at(device).now -= static_cast<int64_t>(bytes);
    } else {
      std::lock_guard<std::mutex> lock(pinned_mutex);
      pinned().erase(reinterpret_cast<uintptr_t>(address));
    }
    std::free(address);
  }

  size_t bytes;
  int device; // -1: pinned memory of the host
  void* address = nullptr;
};

namespace {

void drop(void* context) {
  delete static_cast<Blocks*>(context);
}

c10::DataPtr make(size_t bytes, int index, c10::Device device) {
  if (bytes == 0) {
    return {nullptr, nullptr, &drop, device};
  }
  auto* held = new Blocks(std::make_shared<Block>(bytes, index));
  return {(*held)->address, held, &drop, device};
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    const auto index = current_device();
    return make(bytes, index, c10::Device(kType, index));
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    return make(bytes, -1, c10::Device(c10::DeviceType::CPU));
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};

} // namespace

c10::Allocator* device_allocator() {
  static DeviceAllocator allocator;
  return &allocator;
}

c10::Allocator* pinned_allocator() {
  static PinnedAllocator allocator;
  return &allocator;
}

bool is_pinned(const void* address) {
  const auto place = reinterpret_cast<uintptr_t>(address);
  std::lock_guard<std::mutex> lock(pinned_mutex);
  const auto after = pinned().upper_bound(place);
  return after != pinned().begin() && place < std::prev(after)->first + std::prev(after)->second;
}

Blocks block_of(const c10::Storage& storage) {
  const auto& data = storage.data_ptr();
  return data.get_deleter() == &drop && data.get_context() ? *static_cast<Blocks*>(data.get_context()) : nullptr;
}

void resize_storage(const c10::Storage& storage, size_t bytes) {
  const auto index = storage.device().index();
  wait_for_device(index); // what is queued may use the old block
  auto fresh = make(bytes, index, storage.device());
  std::memcpy(fresh.get(), storage.data(), std::min(bytes, storage.nbytes()));
  auto* impl = storage.unsafeGetStorageImpl();
  impl->set_data_ptr(std::move(fresh));
  impl->set_nbytes(bytes);
}

int64_t allocated(c10::DeviceIndex index) {
  return counters.at(index).now;
}

int64_t peak(c10::DeviceIndex index) {
  return counters.at(index).peak;
}

void reset_peak(c10::DeviceIndex index) {
  counters.at(index).peak = counters.at(index).now.load();
}

int64_t total_memory() {
  static const int64_t mib = std::getenv("ABACUS_MEMORY_MIB") ? std::atoll(std::getenv("ABACUS_MEMORY_MIB")) : 1024;
  return mib << 20;
}

} // namespace abacus
