// Elements eight at a time, a warp's totals, activations: what the kernels of inference programs share.
#pragma once

#include "common.h"
#include "program.h"

namespace ds {

constexpr int kWarps = kThreads / 32;

struct Eight {
  float v[8];
};

// What was read of eight elements: 16 bytes, or 32 of fp32. Reading comes apart from its meaning, so that many reads are
// under way before the first is waited for.
struct Raw {
  uint4 low, high;
};

// From element `at` on, whose address is a multiple of 16 bytes.
__device__ inline Raw read_eight(const void* from, int type, int64_t at) {
  Raw raw{};
  if (type == kFloat) {
    const uint4* x = reinterpret_cast<const uint4*>(static_cast<const float*>(from) + at);
    raw.low = x[0];
    raw.high = x[1];
  } else {
    raw.low = *reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(from) + at);
  }
  return raw;
}

__device__ inline Eight meant(const Raw& raw, int type) {
  uint32_t words[8] = {raw.low.x, raw.low.y, raw.low.z, raw.low.w, raw.high.x, raw.high.y, raw.high.z, raw.high.w};
  Eight out;
  if (type == kFloat) {
#pragma unroll
    for (int k = 0; k < 8; ++k) out.v[k] = __uint_as_float(words[k]);
  } else {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      out.v[2 * k] = type == kBfloat16 ? from_bfloat16(words[k] & 0xffffu) : from_half(words[k] & 0xffffu);
      out.v[2 * k + 1] = type == kBfloat16 ? __uint_as_float(words[k] & 0xffff0000u) : from_half(words[k] >> 16);
    }
  }
  return out;
}

// The sums over the warp of each of kCount numbers (a power of two up to 32): lane i gets that of number i * kCount / 32.
// Halves are exchanged, so it takes kCount shuffles, not 5 * kCount.
template <int kCount>
__device__ inline float warp_totals(float (&x)[kCount], int lane) {
  int step = 16;
#pragma unroll
  for (int half = kCount / 2; half >= 1; half /= 2) {
    bool upper = lane & step;
    for (int i = 0; i < half; ++i) {
      float given = upper ? x[i] : x[i + half];
      float kept = upper ? x[i + half] : x[i];
      x[i] = kept + __shfl_xor_sync(0xffffffffu, given, step);
    }
    step /= 2;
  }
  for (; step >= 1; step /= 2) x[0] += __shfl_xor_sync(0xffffffffu, x[0], step);
  return x[0];
}

// ds_inference_kit.program.Activation
__device__ inline float activated(int activation, float x) {
  switch (activation) {
    case 1: return x > 0.0f || isnan(x) ? x : 0.0f;
    case 2: return 0.5f * x * (1.0f + erff(x * 0.7071067811865476f));
    case 3: return 0.5f * x * (1.0f + tanhf(0.7978845608028654f * (x + 0.044715f * x * x * x)));
    case 4: return x / (1.0f + expf(-x));
    case 5: return x / (1.0f + expf(-1.702f * x));
    case 6: return tanhf(x);
    default: return x;
  }
}

inline const void* in(Address address) { return reinterpret_cast<const void*>(address); }
inline cudaStream_t queue(Address stream) { return reinterpret_cast<cudaStream_t>(stream); }

// A register as a kernel sees it.
struct Lines {
  void* data;
  int64_t stride;
  int type;

  __device__ float get(int64_t row, int64_t col) const { return load_one(data, type, row * stride + col); }
  __device__ void set(int64_t row, int64_t col, float x) const { store_one(data, type, row * stride + col, x); }
};

inline Lines lines(const Frame& f, int number) {
  const Register& r = f.registers.at(static_cast<size_t>(number));
  return {reinterpret_cast<void*>(r.data), r.stride, f.type};
}

}  // namespace ds
