// Stands in for CUDA's headers, so that the kernels compile as C++ and run on the CPU: block after block, each thread
// of a block a fiber that runs until it waits for others. Arithmetic, indexing and barriers are tested that way, on any
// machine; races between blocks, real alignment and speed are not.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <stdexcept>
#include <vector>

#define __device__
#define __host__
#define __global__
#define __grid_constant__
#define __launch_bounds__(threads)
#define __shared__ static

using std::max;
using std::min;

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 0, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(16) float4 { float x, y, z, w; };
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

using cudaStream_t = void*;
using cudaError_t = int;
constexpr int cudaSuccess = 0;
inline cudaError_t cudaGetLastError() { return 0; }
inline const char* cudaGetErrorString(cudaError_t) { return ""; }
inline cudaError_t cudaSetDevice(int) { return 0; }
inline cudaError_t cudaDriverGetVersion(int* version) { return *version = 13000, 0; }
inline cudaError_t cudaRuntimeGetVersion(int* version) { return *version = 13000, 0; }

namespace emulated {

struct Barrier {
  unsigned waiting = 0, generation = 0;
};

struct Block {
  struct Thread {
    ucontext_t context;  // how it begins
    jmp_buf place;  // where it waits; jumps are far cheaper than changes of context, which ask the system
    std::unique_ptr<char[]> stack;
    bool started = false, done = false;
  };
  std::vector<Thread> threads;
  std::function<void()> body;
  jmp_buf scheduler;
  Barrier all, warps[32];
  unsigned alive = 0, current = 0;
  bool progress = false;
  double slots[1024];
};

inline Block block;
inline dim3 thread_index, block_index, grid_size, block_size;

inline void yield() {
  if (_setjmp(block.threads[block.current].place) == 0) _longjmp(block.scheduler, 1);
}

// Runs a thread until it yields.
__attribute__((noinline)) inline void resume(Block::Thread& thread) {
  if (_setjmp(block.scheduler) != 0) return;
  if (thread.started) _longjmp(thread.place, 1);
  thread.started = true;
  setcontext(&thread.context);
}

inline void wait(Barrier& barrier, unsigned expected) {
  unsigned generation = barrier.generation;
  if (++barrier.waiting == expected) {
    barrier.waiting = 0;
    ++barrier.generation;
    block.progress = true;
  } else {
    while (barrier.generation == generation) yield();
  }
}

// A thread's life: one block after the other.
inline void start() {
  for (;;) {
    block.body();
    block.threads[block.current].done = true;
    block.progress = true;
    --block.alive;
    yield();
  }
}

inline void run_block(unsigned threads) {
  constexpr size_t kStack = 64 << 10;
  if (block.threads.size() < threads) block.threads.resize(threads);
  block.alive = threads;
  block.all = {};
  std::fill(block.warps, block.warps + 32, Barrier{});
  for (unsigned t = 0; t < threads; ++t) {
    auto& thread = block.threads[t];
    thread.done = false;
    if (thread.started) continue;
    thread.stack.reset(new char[kStack]);
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = thread.stack.get();
    thread.context.uc_stack.ss_size = kStack;
    thread.context.uc_link = nullptr;
    makecontext(&thread.context, start, 0);
  }
  while (block.alive > 0) {
    block.progress = false;
    for (unsigned t = 0; t < threads; ++t) {
      if (block.threads[t].done) continue;
      block.current = t;
      thread_index = dim3(t, 0, 0);
      resume(block.threads[t]);
    }
    if (!block.progress) {
      block.threads.clear();
      throw std::runtime_error("a kernel waits for threads that never come");
    }
  }
}

inline void launch(dim3 grid, dim3 threads, std::function<void()> body) {
  if (grid.x == 0 || grid.y == 0 || grid.y > 65535) throw std::runtime_error("a launch with an impossible grid");
  block.body = std::move(body);
  grid_size = grid;
  block_size = threads;
  for (unsigned y = 0; y < grid.y; ++y) {
    for (unsigned x = 0; x < grid.x; ++x) {
      block_index = dim3(x, y, 0);
      run_block(threads.x);
    }
  }
}

}  // namespace emulated

#define threadIdx emulated::thread_index
#define blockIdx emulated::block_index
#define gridDim emulated::grid_size
#define blockDim emulated::block_size

inline void __syncthreads() { emulated::wait(emulated::block.all, emulated::block.alive); }

template <class T>
T __shfl_xor_sync(unsigned lanes, T x, int step) {
  if (lanes != 0xffffffffu) throw std::runtime_error("only whole warps are emulated");
  static_assert(sizeof(T) <= sizeof(double));
  unsigned me = emulated::block.current;
  std::memcpy(&emulated::block.slots[me], &x, sizeof(T));
  emulated::wait(emulated::block.warps[me / 32], 32);
  std::memcpy(&x, &emulated::block.slots[me ^ step], sizeof(T));
  emulated::wait(emulated::block.warps[me / 32], 32);
  return x;
}

inline float atomicAdd(float* to, float x) {
  float before = *to;
  *to += x;
  return before;
}

inline uint32_t __umulhi(uint32_t a, uint32_t b) { return static_cast<uint32_t>(uint64_t{a} * b >> 32); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
using std::isfinite;
using std::isnan;

template <class To, class From>
To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}
inline float __uint_as_float(uint32_t bits) { return bits_as<float>(bits); }

using __half = _Float16;
inline __half __ushort_as_half(uint16_t bits) { return bits_as<__half>(bits); }
inline uint16_t __half_as_ushort(__half x) { return bits_as<uint16_t>(x); }
inline float __half2float(__half x) { return static_cast<float>(x); }
inline __half __float2half_rn(float x) { return static_cast<__half>(x); }

struct __nv_bfloat16 { uint16_t bits; };
inline uint16_t __bfloat16_as_ushort(__nv_bfloat16 x) { return x.bits; }
inline __nv_bfloat16 __float2bfloat16_rn(float x) {
  uint32_t bits = bits_as<uint32_t>(x);
  if (std::isnan(x)) return {0x7fff};
  return {static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
