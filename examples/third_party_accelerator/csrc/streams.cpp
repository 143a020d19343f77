// Streams: first in, first out, each emptied by a thread of its own, which starts with the first job.
#include "device.h"

#include <c10/util/Exception.h>

#include <array>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

namespace abacus {
namespace {

constexpr int kStreams = 16; // per device; number 0 is the default one

class Queue {
 public:
  void add(std::function<void()> job) {
    std::lock_guard<std::mutex> lock(mutex_);
    jobs_.push_back(std::move(job));
    if (!started_) {
      started_ = true;
      std::thread([this] { work(); }).detach(); // queues are never destroyed
    }
    changed_.notify_all();
  }

  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return jobs_.empty(); });
  }

  bool idle() {
    std::lock_guard<std::mutex> lock(mutex_);
    return jobs_.empty();
  }

 private:
  void work() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return !jobs_.empty(); });
      auto job = std::move(jobs_.front()); // its place is kept until it is done
      lock.unlock();
      job();
      job = nullptr;
      lock.lock();
      jobs_.pop_front();
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> jobs_;
  bool started_ = false;
};

Queue& queue(c10::DeviceIndex device, c10::StreamId stream) {
  static auto* all = new std::array<std::array<Queue, kStreams>, 64>();
  return all->at(device).at(stream);
}

thread_local std::array<c10::StreamId, 64> current{};
std::array<std::atomic<int>, 64> handed_out{};

c10::Stream as_stream(c10::DeviceIndex device, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, device), id);
}

c10::DeviceIndex index_of(c10::Device device) {
  return device.has_index() ? device.index() : current_device();
}

} // namespace

c10::Stream current_stream(c10::DeviceIndex index) {
  return as_stream(index, current.at(index));
}

c10::Stream exchange_stream(c10::Stream stream) {
  const auto index = index_of(stream.device());
  const auto before = current_stream(index);
  current.at(index) = stream.id();
  return before;
}

c10::Stream new_stream(c10::DeviceIndex index) {
  return as_stream(index, 1 + handed_out.at(index)++ % (kStreams - 1));
}

void enqueue(const c10::Stream& stream, std::function<void()> job) {
  queue(stream.device_index(), stream.id()).add(std::move(job));
}

void wait_for(const c10::Stream& stream) {
  queue(stream.device_index(), stream.id()).wait();
}

bool is_idle(const c10::Stream& stream) {
  return queue(stream.device_index(), stream.id()).idle();
}

void wait_for_device(c10::DeviceIndex index) {
  for (int id = 0; id < kStreams; ++id) {
    queue(index, id).wait();
  }
}

struct Mark {
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
  std::chrono::steady_clock::time_point time;
};

Marks record(const c10::Stream& stream) {
  auto mark = std::make_shared<Mark>();
  auto pass = [mark] {
    std::lock_guard<std::mutex> lock(mark->mutex);
    mark->time = std::chrono::steady_clock::now();
    mark->done = true;
    mark->changed.notify_all();
  };
  is_idle(stream) ? pass() : enqueue(stream, pass);
  return mark;
}

void block(const c10::Stream& stream, Marks mark) {
  if (!is_done(mark)) {
    enqueue(stream, [mark] { wait_for(mark); });
  }
}

void wait_for(const Marks& mark) {
  std::unique_lock<std::mutex> lock(mark->mutex);
  mark->changed.wait(lock, [&] { return mark->done; });
}

bool is_done(const Marks& mark) {
  std::lock_guard<std::mutex> lock(mark->mutex);
  return mark->done;
}

double milliseconds(const Marks& from, const Marks& to) {
  TORCH_CHECK(is_done(from) && is_done(to), "both events must be done before the time between them is known");
  return std::chrono::duration<double, std::milli>(to->time - from->time).count();
}

} // namespace abacus
