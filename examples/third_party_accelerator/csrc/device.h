// The abacus: a device in software. Its memory is a counted part of the host's; its streams are queues that copy.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include <functional>
#include <memory>

namespace abacus {

constexpr auto kType = c10::DeviceType::PrivateUse1;

// -- devices (device.cpp) --
c10::DeviceIndex device_count();
c10::DeviceIndex current_device();
void set_device(c10::DeviceIndex index);

// -- memory (memory.cpp) --
struct Block;
using Blocks = std::shared_ptr<Block>;
c10::Allocator* device_allocator();
c10::Allocator* pinned_allocator();
bool is_pinned(const void* address);
Blocks block_of(const c10::Storage& storage); // null: memory of somebody else
void resize_storage(const c10::Storage& storage, size_t bytes);
int64_t allocated(c10::DeviceIndex index);
int64_t peak(c10::DeviceIndex index);
void reset_peak(c10::DeviceIndex index);
int64_t total_memory();

// -- streams and events (streams.cpp) --
c10::Stream current_stream(c10::DeviceIndex index);
c10::Stream exchange_stream(c10::Stream stream);
c10::Stream new_stream(c10::DeviceIndex index);
void enqueue(const c10::Stream& stream, std::function<void()> job);
void wait_for(const c10::Stream& stream);
bool is_idle(const c10::Stream& stream);
void wait_for_device(c10::DeviceIndex index);

struct Mark; // one recording of an event
using Marks = std::shared_ptr<Mark>;
Marks record(const c10::Stream& stream);
void block(const c10::Stream& stream, Marks mark);
void wait_for(const Marks& mark);
bool is_done(const Marks& mark);
double milliseconds(const Marks& from, const Marks& to);

} // namespace abacus
