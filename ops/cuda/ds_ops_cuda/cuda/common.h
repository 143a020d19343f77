// What the kernel files share: element types told at run time, elements four at a time, sums over a team of threads.
//
// A type is a number that is the same for all threads, so choosing by it costs next to nothing beside memory, and one
// kernel serves every mix of types. All arithmetic is fp32 (sums of squares fp64); results are rounded once.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <stdexcept>
#include <string>

namespace ds {

enum Type : int { kFloat = 0, kBfloat16 = 1, kHalf = 2, kDouble = 3, kNone = 4 };

constexpr int kThreads = 256;

// The launch before this call, or its arguments, may have failed; kernels that fail later are torch's to report.
inline void check_launch(const char* what) {
  cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string(what) + ": CUDA: " + cudaGetErrorString(error));
  }
}

struct Pack {
  float v[4];
};

__device__ inline float from_bfloat16(uint32_t bits) { return __uint_as_float(bits << 16); }
__device__ inline float from_half(uint32_t bits) { return __half2float(__ushort_as_half(static_cast<uint16_t>(bits))); }

__device__ inline uint32_t to_bits(int type, float x) {
  return type == kBfloat16 ? __bfloat16_as_ushort(__float2bfloat16_rn(x)) : __half_as_ushort(__float2half_rn(x));
}

__device__ inline float load_one(const void* from, int type, int64_t i) {
  if (type == kFloat) return static_cast<const float*>(from)[i];
  uint32_t bits = static_cast<const uint16_t*>(from)[i];
  return type == kBfloat16 ? from_bfloat16(bits) : from_half(bits);
}

__device__ inline void store_one(void* to, int type, int64_t i, float x) {
  if (type == kFloat) {
    static_cast<float*>(to)[i] = x;
  } else {
    static_cast<uint16_t*>(to)[i] = static_cast<uint16_t>(to_bits(type, x));
  }
}

// `x` as it is after being stored and read again.
__device__ inline float rounded(int type, float x) {
  if (type == kFloat) return x;
  uint32_t bits = to_bits(type, x);
  return type == kBfloat16 ? from_bfloat16(bits) : from_half(bits);
}

// Whether elements from `address` on can be moved four at a time.
__host__ __device__ inline bool is_wide(const void* address, int type) {
  return reinterpret_cast<uintptr_t>(address) % (type == kFloat ? 16 : 8) == 0;
}

// Elements i .. i+3; those from `end` on are `fill`. wide: see is_wide, for i a multiple of four.
__device__ inline Pack load(const void* from, int type, int64_t i, int64_t end, bool wide, float fill = 0.0f) {
  Pack out;
  if (!wide || i + 4 > end) {
    for (int k = 0; k < 4; ++k) out.v[k] = i + k < end ? load_one(from, type, i + k) : fill;
  } else if (type == kFloat) {
    float4 x = *reinterpret_cast<const float4*>(static_cast<const float*>(from) + i);
    out = {{x.x, x.y, x.z, x.w}};
  } else {
    uint2 x = *reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(from) + i);
    uint32_t bits[4] = {x.x & 0xffffu, x.x >> 16, x.y & 0xffffu, x.y >> 16};
    for (int k = 0; k < 4; ++k) out.v[k] = type == kBfloat16 ? from_bfloat16(bits[k]) : from_half(bits[k]);
  }
  return out;
}

__device__ inline void store(void* to, int type, int64_t i, int64_t end, bool wide, const Pack& x) {
  if (!wide || i + 4 > end) {
    for (int k = 0; k < 4 && i + k < end; ++k) store_one(to, type, i + k, x.v[k]);
  } else if (type == kFloat) {
    *reinterpret_cast<float4*>(static_cast<float*>(to) + i) = make_float4(x.v[0], x.v[1], x.v[2], x.v[3]);
  } else {
    uint32_t low = to_bits(type, x.v[0]) | to_bits(type, x.v[1]) << 16;
    uint32_t high = to_bits(type, x.v[2]) | to_bits(type, x.v[3]) << 16;
    *reinterpret_cast<uint2*>(static_cast<uint16_t*>(to) + i) = make_uint2(low, high);
  }
}

// -- teams: kSize threads (a warp, or the whole block of kThreads) that work on one row ------------------------------

struct Add {
  template <class T>
  __device__ T operator()(T a, T b) const { return a + b; }
};

struct Max {  // carries NaN, as torch's does
  __device__ float operator()(float a, float b) const { return a > b || isnan(a) ? a : b; }
};

// `x` combined over the team, in an order that is always the same; every thread of the team gets it.
template <int kSize, class T, class Op>
__device__ T combine(T x, Op op) {
  static_assert(kSize == 32 || kSize == kThreads, "a team is a warp or a block");
  for (int step = 16; step > 0; step /= 2) x = op(x, __shfl_xor_sync(0xffffffffu, x, step));
  if (kSize == 32) return x;
  __shared__ T parts[kThreads / 32];
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
  __syncthreads();
  x = parts[0];
  for (int i = 1; i < kThreads / 32; ++i) x = op(x, parts[i]);
  __syncthreads();  // before the next call writes into parts
  return x;
}

// The row of this thread's team, which may be beyond the last; and the thread's place in its team.
template <int kSize>
__device__ int64_t team_row() { return static_cast<int64_t>(blockIdx.x) * (kThreads / kSize) + threadIdx.x / kSize; }
template <int kSize>
__device__ int team_rank() { return threadIdx.x % kSize; }

inline int64_t blocks_for(int64_t rows, int team) {
  int64_t per_block = kThreads / team, blocks = (rows + per_block - 1) / per_block;
  if (blocks > 0x7fffffff) throw std::runtime_error("more rows than one launch of a CUDA kernel takes (2^31 blocks)");
  return blocks;
}

}  // namespace ds
