// The sum of squares of many tensors, and quantisation in groups. ds_core.partition.squared_norm and
// ds_kernel_kit.references say what they mean; quantised values equal the reference's bit for bit.

#include "table.h"

namespace ds {
namespace {

__device__ inline double square(double x) { return x * x; }

// One fp64 for each block, added up by the second kernel in an order that is always the same.
__global__ void __launch_bounds__(kThreads) squares_kernel(const __grid_constant__ Table table, double* partials) {
  Piece piece = piece_of(table, blockIdx.x);
  const void* x = table.address[0][piece.place];
  int type = table.own_type[piece.place];
  double sum = 0;
  if (type == kDouble) {
    for (int64_t i = piece.begin + threadIdx.x; i < piece.end; i += kThreads) {
      sum += square(static_cast<const double*>(x)[i]);
    }
  } else {
    bool wide = is_wide(x, type);
    for (int64_t i = piece.begin + threadIdx.x * 4; i < piece.end; i += kThreads * 4) {
      Pack row = load(x, type, i, piece.end, wide);
      for (int k = 0; k < 4; ++k) sum += square(row.v[k]);
    }
  }
  sum = combine<kThreads>(sum, Add());
  if (threadIdx.x == 0) partials[blockIdx.x] = sum;
}

__global__ void __launch_bounds__(kThreads) total_kernel(const double* partials, int64_t count, double* total) {
  double sum = 0;
  for (int64_t i = threadIdx.x; i < count; i += kThreads) sum += partials[i];
  sum = combine<kThreads>(sum, Add());
  if (threadIdx.x == 0) *total = sum;
}

// -- quantisation: a team of threads for each group ------------------------------------------------------------------

// Writes group `row` of values value(i), begin <= i < end, whose range the whole team knows.
template <int kTeam, class Value>
__device__ void write_group(Value value, int64_t row, int64_t begin, int64_t end, float low, float high, int bits,
                            bool symmetric, uint8_t* q, float* scales, float* lows) {
  int most = symmetric ? (1 << (bits - 1)) - 1 : (1 << bits) - 1;
  float scale = __fdiv_rn(symmetric ? Max()(-low, high) : high - low, static_cast<float>(most));
  float least = symmetric ? -static_cast<float>(most) : 0.0f, base = symmetric ? 0.0f : low;
  bool counts = scale > 0.0f && isfinite(scale);
  if (team_rank<kTeam>() == 0) {
    scales[row] = scale;
    if (!symmetric) lows[row] = low;
  }
  auto whole = [&](int64_t i) {
    if (!counts || i >= end) return 0;
    float number = rintf(__fdiv_rn(value(i) - base, scale));
    return static_cast<int>(fminf(fmaxf(number, least), static_cast<float>(most)));
  };
  if (bits == 8) {
    for (int64_t i = begin + team_rank<kTeam>(); i < end; i += kTeam) q[i] = static_cast<uint8_t>(whole(i));
  } else {  // groups are even, so each byte is of one group
    for (int64_t i = begin + team_rank<kTeam>() * 2; i < end; i += kTeam * 2) {
      q[i / 2] = static_cast<uint8_t>((whole(i) & 15) | (whole(i + 1) & 15) << 4);
    }
  }
}

template <int kTeam>
__global__ void __launch_bounds__(kThreads)
    quantize_kernel(const void* x, int type, int64_t numel, int64_t group, int bits, bool symmetric, uint8_t* q,
                    float* scales, float* lows) {
  int64_t row = team_row<kTeam>();
  int64_t begin = row * group, end = min(begin + group, numel);
  if (begin >= numel) return;  // the whole team
  float low = INFINITY, high = -INFINITY;
  bool wide = group % 4 == 0 && is_wide(x, type);
  for (int64_t i = begin + team_rank<kTeam>() * 4; i < end; i += kTeam * 4) {
    Pack pack = load(x, type, i, end, wide, load_one(x, type, begin));
    for (int k = 0; k < 4; ++k) {
      low = -Max()(-low, -pack.v[k]);
      high = Max()(high, pack.v[k]);
    }
  }
  low = -combine<kTeam>(-low, Max());
  high = combine<kTeam>(high, Max());
  auto value = [&](int64_t i) { return load_one(x, type, i); };
  write_group<kTeam>(value, row, begin, end, low, high, bits, symmetric, q, scales, lows);
}

// What rows of symmetrically quantised values stand for, added up. steps: from one row to the next, in elements.
struct Rows {
  const uint8_t* q;
  const float* scales;
  int64_t q_step, scales_step, count;

  __device__ float sum(int64_t i, int64_t group_number, int bits) const {
    float total = 0.0f;
    for (int64_t row = 0; row < count; ++row) {
      const uint8_t* from = q + row * q_step;
      int value = bits == 8 ? static_cast<int8_t>(from[i]) : ((from[i / 2] >> i % 2 * 4 & 15) ^ 8) - 8;
      float x = __fmul_rn(static_cast<float>(value), scales[row * scales_step + group_number]);
      total = __fadd_rn(total, x);
    }
    return total;
  }
};

__global__ void __launch_bounds__(kThreads)
    dequantize_sum_kernel(Rows rows, void* out, int type, int64_t numel, int64_t group, int bits) {
  int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads * 4;
  bool wide = is_wide(out, type);
  for (int64_t i = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * 4; i < numel; i += stride) {
    Pack pack = {};
    for (int k = 0; k < 4 && i + k < numel; ++k) pack.v[k] = rows.sum(i + k, (i + k) / group, bits);
    store(out, type, i, numel, wide, pack);
  }
}

// The sums are worked out twice, for their range and for what is written: nothing is kept between.
template <int kTeam>
__global__ void __launch_bounds__(kThreads)
    requantize_sum_kernel(Rows rows, int64_t numel, int64_t group, int bits, uint8_t* q, float* scales) {
  int64_t number = team_row<kTeam>();
  int64_t begin = number * group, end = min(begin + group, numel);
  if (begin >= numel) return;  // the whole team
  auto value = [&](int64_t i) { return rows.sum(i, number, bits); };
  float high = 0.0f;
  for (int64_t i = begin + team_rank<kTeam>(); i < end; i += kTeam) high = Max()(high, fabsf(value(i)));
  high = combine<kTeam>(high, Max());
  write_group<kTeam>(value, number, begin, end, -high, high, bits, true, q, scales, nullptr);
}

__global__ void __launch_bounds__(kThreads)
    dequantize_kernel(void* out, int type, int64_t numel, int64_t group, int bits, const uint8_t* q,
                      const float* scales, const float* lows) {
  int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads * 4;
  bool wide = is_wide(out, type);
  for (int64_t i = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * 4; i < numel; i += stride) {
    Pack row = {};
    for (int k = 0; k < 4 && i + k < numel; ++k) {
      int64_t which = (i + k) / group;
      int value = bits == 8 ? q[i + k] : q[(i + k) / 2] >> (i + k) % 2 * 4 & 15;
      if (!lows) value = bits == 8 ? static_cast<int8_t>(value) : (value ^ 8) - 8;
      // two roundings, as the reference has them
      row.v[k] = __fmul_rn(static_cast<float>(value), scales[which]);
      if (lows) row.v[k] = __fadd_rn(row.v[k], lows[which]);
    }
    store(out, type, i, numel, wide, row);
  }
}

}  // namespace

void squared_norm(Address stream, const Sizes& sizes, const std::vector<int>& types, const Addresses& addresses,
                  Address partials, Address total) {
  auto queue = reinterpret_cast<cudaStream_t>(stream);
  auto sums = reinterpret_cast<double*>(partials);
  int64_t blocks = 0;
  const std::vector<const Addresses*> lists = {&addresses, nullptr, nullptr, nullptr, nullptr};
  for_each_table(sizes, {kNone, kNone, kNone, kNone, kNone}, lists,
                 [&](Table& table, size_t start, int64_t blocks_before) {
                   for (int i = 0; i < table.count; ++i) table.own_type[i] = static_cast<uint8_t>(types.at(start + i));
                   uint32_t more = table.first[table.count];
                   squares_kernel<<<more, kThreads, 0, queue>>>(table, sums + blocks_before);
                   check_launch("squared_norm");
                   blocks = blocks_before + more;
                 });
  total_kernel<<<1, kThreads, 0, queue>>>(sums, blocks, reinterpret_cast<double*>(total));
  check_launch("squared_norm");
}

void quantize(Address stream, int64_t numel, int type, Address x, int64_t group, int bits, bool symmetric, Address q,
              Address scales, Address lows) {
  if (numel == 0) return;
  auto queue = reinterpret_cast<cudaStream_t>(stream);
  int64_t groups = (numel + group - 1) / group;
  auto run = [&](auto kernel, int team) {
    kernel<<<blocks_for(groups, team), kThreads, 0, queue>>>(
        reinterpret_cast<const void*>(x), type, numel, group, bits, symmetric, reinterpret_cast<uint8_t*>(q),
        reinterpret_cast<float*>(scales), reinterpret_cast<float*>(lows));
  };
  if (group <= 2048) run(quantize_kernel<32>, 32); else run(quantize_kernel<kThreads>, kThreads);
  check_launch("quantize");
}

void dequantize(Address stream, int64_t numel, int type, Address out, int64_t group, int bits, Address q,
                Address scales, Address lows) {
  if (numel == 0) return;
  int64_t blocks = (numel + kThreads * 4 - 1) / (kThreads * 4);
  dequantize_kernel<<<blocks < 65536 ? blocks : 65536, kThreads, 0, reinterpret_cast<cudaStream_t>(stream)>>>(
      reinterpret_cast<void*>(out), type, numel, group, bits, reinterpret_cast<const uint8_t*>(q),
      reinterpret_cast<const float*>(scales), reinterpret_cast<const float*>(lows));
  check_launch("dequantize");
}

void dequantize_sum(Address stream, int64_t numel, int64_t group, int bits, int64_t rows, Address q, int64_t q_step,
                    Address scales, int64_t scales_step, int type, Address out, Address out_scales) {
  if (numel == 0) return;
  auto queue = reinterpret_cast<cudaStream_t>(stream);
  Rows from = {reinterpret_cast<const uint8_t*>(q), reinterpret_cast<const float*>(scales), q_step, scales_step, rows};
  if (!out_scales) {
    int64_t blocks = (numel + kThreads * 4 - 1) / (kThreads * 4);
    dequantize_sum_kernel<<<blocks < 65536 ? blocks : 65536, kThreads, 0, queue>>>(
        from, reinterpret_cast<void*>(out), type, numel, group, bits);
    check_launch("dequantize_sum");
    return;
  }
  int64_t groups = (numel + group - 1) / group;
  auto run = [&](auto kernel, int team) {
    kernel<<<blocks_for(groups, team), kThreads, 0, queue>>>(from, numel, group, bits, reinterpret_cast<uint8_t*>(out),
                                                             reinterpret_cast<float*>(out_scales));
  };
  if (group <= 2048) run(requantize_sum_kernel<32>, 32); else run(requantize_sum_kernel<kThreads>, kThreads);
  check_launch("requantize_sum");
}

}  // namespace ds
