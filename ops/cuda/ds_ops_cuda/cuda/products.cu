// Few rows times weights: each weight is read once, by one warp, for up to eight rows; the sums are fp32.

#include "eight.h"

namespace ds {
namespace {

// A weight as a kernel sees it: lines are the weight's rows. Those that are read eight elements at a time (all but those
// of contiguous columns) have `in` and groups that are multiples of eight, and 16, 8 or 4 bytes' alignment.
struct Weight {
  const void* data;
  const uint16_t *scales, *lows;  // fp16
  int64_t out, in, group, groups;  // groups: of one line
  int shift;  // log2 of group, or -1
};

Weight weight(const Matrix& m) {
  Weight w{in(m.data), reinterpret_cast<const uint16_t*>(m.scales), reinterpret_cast<const uint16_t*>(m.lows), m.out, m.in,
           m.group, m.group ? m.in / m.group : 0, -1};
  for (int s = 0; s < 31; ++s) {
    if (m.group == int64_t{1} << s) w.shift = s;
  }
  return w;
}

// A whole number in 0 .. 255 as a float, without the slow conversion: it becomes the last bits of 2^23 + number.
__device__ inline float small(uint32_t number) { return __uint_as_float(0x4b000000u | number) - 8388608.0f; }

// Eight weights, which are q * scale + low each.
struct Part8 {
  Eight q;
  float scale, low;
};

struct RawPart {
  Raw q;
  uint16_t scale, low;
};

template <int kKind>
__device__ inline RawPart read_part(const Weight& w, int64_t line, int64_t k) {
  RawPart raw{};
  int64_t at = line * w.in + k;
  if (kKind <= kHalf) {
    raw.q = read_eight(w.data, kKind, at);
    return raw;
  }
  if (kKind == kInt8) {
    uint2 x = *reinterpret_cast<const uint2*>(static_cast<const uint8_t*>(w.data) + at);
    raw.q.low.x = x.x;
    raw.q.low.y = x.y;
  } else {
    raw.q.low.x = *reinterpret_cast<const uint32_t*>(static_cast<const uint8_t*>(w.data) + at / 2);
  }
  int64_t group = line * w.groups + (w.shift >= 0 ? k >> w.shift : k / w.group);
  raw.scale = w.scales[group];
  if (w.lows) raw.low = w.lows[group];
  return raw;
}

// signed_: without lows numbers are signed: a flip of the sign's bit makes them whole, an offset makes up for it.
template <int kKind>
__device__ inline Part8 meant(const RawPart& raw, bool signed_) {
  if (kKind <= kHalf) return {meant(raw.q, kKind), 1.0f, 0.0f};
  Part8 p;
  p.scale = from_half(raw.scale);
  p.low = from_half(raw.low);
  float offset = !signed_ ? 0.0f : kKind == kInt8 ? -128.0f : -8.0f;
  if (kKind == kInt8) {
    uint32_t flip = signed_ ? 0x80808080u : 0u, words[2] = {raw.q.low.x ^ flip, raw.q.low.y ^ flip};
#pragma unroll
    for (int i = 0; i < 8; ++i) p.q.v[i] = small(words[i / 4] >> i % 4 * 8 & 255u) + offset;
  } else {
    uint32_t word = raw.q.low.x ^ (signed_ ? 0x88888888u : 0u);
#pragma unroll
    for (int i = 0; i < 8; ++i) p.q.v[i] = small(word >> i * 4 & 15u) + offset;
  }
  return p;
}

// Adds to sums[l][r] this lane's part of the product of line l and row r of x. Rows behind the last are the last again.
template <int kKind, int kRows>
__device__ inline void add_products(float (&sums)[2 * kRows], const Weight& w0, int64_t line0, const Weight& w1,
                                    int64_t line1, const void* x, int type, int64_t stride, int rows) {
#pragma unroll(kRows == 1 ? 4 : 2)
  for (int64_t k = threadIdx.x % 32 * 8; k < w0.in; k += 256) {
    RawPart raw_a = read_part<kKind>(w0, line0, k), raw_b = read_part<kKind>(w1, line1, k);
    Part8 a = meant<kKind>(raw_a, !w0.lows), b = meant<kKind>(raw_b, !w1.lows);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      Eight y = meant(read_eight(x, type, min(r, rows - 1) * stride + k), type);
      float dot_a = 0.0f, dot_b = 0.0f, all = 0.0f;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        dot_a += a.q.v[i] * y.v[i];
        dot_b += b.q.v[i] * y.v[i];
        if (kKind > kHalf) all += y.v[i];
      }
      sums[r] += kKind > kHalf ? a.scale * dot_a + a.low * all : dot_a;
      sums[kRows + r] += kKind > kHalf ? b.scale * dot_b + b.low * all : dot_b;
    }
  }
}

struct Output {
  Lines to;
  const void* bias;
  int bias_type;

  __device__ float with_bias(float x, int64_t col) const { return bias ? x + load_one(bias, bias_type, col) : x; }
};

struct Products {
  Weight weight[3];
  Output out[3];
  int64_t units[3];  // pairs of lines of all weights up to this one; gated: lines
  int count, activation;
  bool gated;
  Lines x, add;  // add.data null: nothing is added
  int64_t first_row;
  int rows;

  __device__ void store(const Output& o, int64_t row, int64_t col, float x) const {
    o.to.set(row, col, add.data ? x + add.get(row, col) : x);
  }
};

// A warp takes two lines: neighbours of one weight, or those of gate and up.
template <int kKind, int kRows>
__global__ void __launch_bounds__(kThreads) product_kernel(const __grid_constant__ Products p) {
  int lane = threadIdx.x % 32;
  int64_t unit = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (unit >= p.units[p.count - 1]) return;  // the whole warp
  int which = 0;
  while (!p.gated && unit >= p.units[which]) ++which;
  if (which > 0) unit -= p.units[which - 1];
  const Weight &w0 = p.weight[which], &w1 = p.gated ? p.weight[1] : w0;
  int64_t line0 = p.gated ? unit : 2 * unit, line1 = p.gated ? unit : min(line0 + 1, w0.out - 1);
  const char* x = static_cast<const char*>(p.x.data) + p.first_row * p.x.stride * (p.x.type == kFloat ? 4 : 2);
  float sums[2 * kRows] = {};
  add_products<kKind, kRows>(sums, w0, line0, w1, line1, x, p.x.type, p.x.stride, p.rows);
  float total = warp_totals(sums, lane);
  int number = lane * (2 * kRows) / 32, row = number % kRows;
  bool second = number >= kRows, mine = lane % (16 / kRows) == 0 && row < p.rows;
  if (p.gated) {
    total = p.out[second].with_bias(total, unit);
    float other = __shfl_xor_sync(0xffffffffu, total, 16);
    if (mine && !second) p.out[0].to.set(p.first_row + row, unit, activated(p.activation, total) * other);
  } else if (mine && (!second || 2 * unit + 1 < w0.out)) {
    const Output& o = p.out[which];
    int64_t col = 2 * unit + second;
    p.store(o, p.first_row + row, col, activated(p.activation, o.with_bias(total, col)));
  }
}

// Weights of contiguous columns: each lane of a warp has a column, and the warps of a block share the rows of the memory.
template <int kKind, int kRows>
__global__ void __launch_bounds__(kThreads) columns_product_kernel(const __grid_constant__ Products p) {
  __shared__ float parts[kWarps][kRows][32];
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const Weight& w = p.weight[0];
  int64_t col = static_cast<int64_t>(blockIdx.x) * 32 + lane;
  float sums[kRows] = {};
  if (col < w.out) {
#pragma unroll 4
    for (int64_t k = warp; k < w.in; k += kWarps) {
      float one = load_one(w.data, kKind, k * w.out + col);
#pragma unroll
      for (int r = 0; r < kRows; ++r) sums[r] += one * p.x.get(p.first_row + min(r, p.rows - 1), k);
    }
  }
  for (int r = 0; r < kRows; ++r) parts[warp][r][lane] = sums[r];
  __syncthreads();
  for (int r = warp; r < p.rows; r += kWarps) {
    if (col >= w.out) continue;
    float total = 0.0f;
    for (int i = 0; i < kWarps; ++i) total += parts[i][r][lane];
    p.store(p.out[0], p.first_row + r, col, activated(p.activation, p.out[0].with_bias(total, col)));
  }
}

// Calls run(std::integral_constant of the kind).
template <class Run>
void with_kind(int kind, Run run) {
  switch (kind) {
    case kFloat: return run(std::integral_constant<int, kFloat>());
    case kBfloat16: return run(std::integral_constant<int, kBfloat16>());
    case kHalf: return run(std::integral_constant<int, kHalf>());
    case kInt8: return run(std::integral_constant<int, kInt8>());
    case kInt4: return run(std::integral_constant<int, kInt4>());
    default: throw std::runtime_error("a weight of an unknown kind");
  }
}

template <int kKind, int kRows>
void launch_rows(const Products& p, bool columns, Address stream) {
  if (columns) {
    if constexpr (kKind <= kHalf) {
      unsigned blocks = static_cast<unsigned>((p.weight[0].out + 31) / 32);
      columns_product_kernel<kKind, kRows><<<blocks, kThreads, 0, queue(stream)>>>(p);
    }
  } else {
    unsigned blocks = static_cast<unsigned>((p.units[p.count - 1] + kWarps - 1) / kWarps);
    product_kernel<kKind, kRows><<<blocks, kThreads, 0, queue(stream)>>>(p);
  }
}

void launch(Products& p, int kind, bool columns, int64_t rows, Address stream) {
  with_kind(kind, [&](auto of) {
    constexpr int kKind = decltype(of)::value;
    for (p.first_row = 0; p.first_row < rows; p.first_row += 8) {
      p.rows = static_cast<int>(min(rows - p.first_row, int64_t{8}));
      if (p.rows == 1) launch_rows<kKind, 1>(p, columns, stream);
      else if (p.rows == 2) launch_rows<kKind, 2>(p, columns, stream);
      else if (p.rows <= 4) launch_rows<kKind, 4>(p, columns, stream);
      else launch_rows<kKind, 8>(p, columns, stream);
      check_launch("product");
    }
  });
}

// -- experts ---------------------------------------------------------------------------------------------------------

// One warp per row: the top_k most probable experts and their shares. logits [rows, experts] are used up.
__global__ void __launch_bounds__(kThreads)
    choose_kernel(float* logits, float* shares, int32_t* chosen, int64_t rows, int experts, int top_k, bool normalize) {
  int64_t row = team_row<32>();
  if (row >= rows) return;
  int lane = threadIdx.x % 32;
  float* mine = logits + row * experts;
  float highest = -INFINITY, sum = 0.0f, taken = 0.0f;
  for (int e = lane; e < experts; e += 32) highest = Max()(highest, mine[e]);
  highest = combine<32>(highest, Max());
  for (int e = lane; e < experts; e += 32) sum += expf(mine[e] - highest);
  sum = combine<32>(sum, Add());
  for (int i = 0; i < top_k; ++i) {
    float best = -INFINITY;
    int which = experts;
    for (int e = lane; e < experts; e += 32) {
      if (which == experts || mine[e] > best) best = mine[e], which = e;
    }
    for (int step = 16; step > 0; step /= 2) {
      float other = __shfl_xor_sync(0xffffffffu, best, step);
      int index = __shfl_xor_sync(0xffffffffu, which, step);
      bool better = other > best || (other == best && index < which) || which == experts;
      if (better) best = other, which = index;
    }
    float share = expf(best - highest) / sum;
    taken += share;
    if (which % 32 == lane) mine[which] = -INFINITY;
    if (lane == 0) {
      shares[row * top_k + i] = share;
      chosen[row * top_k + i] = which;
    }
  }
  if (normalize && lane == 0) {
    for (int i = 0; i < top_k; ++i) shares[row * top_k + i] /= taken;
  }
}

struct Mixture {
  Weight gate, up, down;  // of no expert: see of()
  const int64_t* table;
  const float* shares;
  const int32_t* chosen;
  float* inner;  // [rows * top_k, gate.out]
  int64_t here, first;
  int top_k, activation;
  Lines x, out;

  // The weight of one expert here; part: 0 gate, 1 up, 2 down.
  __device__ Weight of(Weight like, int part, int64_t expert) const {
    const int64_t* at = table + (part * here + expert) * 3;
    like.data = reinterpret_cast<const void*>(at[0]);
    like.scales = reinterpret_cast<const uint16_t*>(at[1]);
    like.lows = reinterpret_cast<const uint16_t*>(at[2]);
    return like;
  }
};

// blockIdx.y: a row and one of its experts; a warp for each element of the expert's inner row.
template <int kKind>
__global__ void __launch_bounds__(kThreads) expert_inner_kernel(const __grid_constant__ Mixture m) {
  int64_t line = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32, slot = blockIdx.y;
  int64_t expert = m.chosen[slot] - m.first;
  if (line >= m.gate.out || expert < 0 || expert >= m.here) return;  // the whole warp
  float sums[2] = {};
  const char* x = static_cast<const char*>(m.x.data) + slot / m.top_k * m.x.stride * (m.x.type == kFloat ? 4 : 2);
  add_products<kKind, 1>(sums, m.of(m.gate, 0, expert), line, m.of(m.up, 1, expert), line, x, m.x.type, 0, 1);
  float total = warp_totals(sums, threadIdx.x % 32), other = __shfl_xor_sync(0xffffffffu, total, 16);
  if (threadIdx.x % 32 == 0) m.inner[slot * m.gate.out + line] = activated(m.activation, total) * other;
}

// blockIdx.y: a row; a warp for two of its elements, summed over the row's experts that are here.
template <int kKind>
__global__ void __launch_bounds__(kThreads) expert_outer_kernel(const __grid_constant__ Mixture m) {
  int64_t line = (static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32) * 2, row = blockIdx.y;
  if (line >= m.down.out) return;
  float all[2] = {};
  for (int64_t slot = row * m.top_k; slot < (row + 1) * m.top_k; ++slot) {
    int64_t expert = m.chosen[slot] - m.first;
    if (expert < 0 || expert >= m.here) continue;
    float sums[2] = {};
    Weight w = m.of(m.down, 2, expert);
    add_products<kKind, 1>(sums, w, line, w, min(line + 1, w.out - 1), m.inner + slot * m.gate.out, kFloat, 0, 1);
    for (int i = 0; i < 2; ++i) all[i] += m.shares[slot] * sums[i];
  }
  float total = warp_totals(all, threadIdx.x % 32);
  int64_t col = line + threadIdx.x % 32 / 16;
  if (threadIdx.x % 16 == 0 && col < m.down.out) m.out.set(row, col, total);
}

}  // namespace

Launch products(int x, const std::vector<Part>& parts, bool gated, int activation, int add, bool kept) {
  return [=](const Frame& f, Address stream) {
    Products p{};
    p.count = static_cast<int>(parts.size());
    p.activation = activation;
    p.gated = gated;
    p.x = lines(f, x);
    if (add >= 0) p.add = lines(f, add);
    const Matrix& first = parts.at(0).weight;
    int64_t units = 0;
    for (int i = 0; i < p.count; ++i) {
      const Part& one = parts[static_cast<size_t>(i)];
      p.weight[i] = weight(one.weight);
      p.out[i] = {lines(f, one.out), in(one.bias.first), one.bias.second};
      units = gated ? one.weight.out : units + (one.weight.out + 1) / 2;
      p.units[i] = units;
    }
    launch(p, first.kind, first.columns, kept ? f.kept : f.rows, stream);
  };
}

Launch experts(const MixtureOfExperts& e, bool kept) {
  return [=](const Frame& f, Address stream) {
    int64_t rows = kept ? f.kept : f.rows, slots = rows * e.top_k;
    if (rows == 0) return;
    float* logits = reinterpret_cast<float*>(f.scratch);
    float* shares = logits + rows * e.router.out;
    int32_t* chosen = reinterpret_cast<int32_t*>(shares + slots);
    float* inner = logits + (rows * e.router.out + 2 * slots + 3) / 4 * 4;
    Products router{};
    router.count = 1;
    router.x = lines(f, e.x);
    router.weight[0] = weight(e.router);
    router.out[0].to = {logits, e.router.out, kFloat};
    router.units[0] = (e.router.out + 1) / 2;
    launch(router, e.router.kind, e.router.columns, rows, stream);
    choose_kernel<<<static_cast<unsigned>(blocks_for(rows, 32)), kThreads, 0, queue(stream)>>>(
        logits, shares, chosen, rows, static_cast<int>(e.router.out), static_cast<int>(e.top_k), e.normalize);
    Mixture m{weight(e.gate), weight(e.up), weight(e.down), reinterpret_cast<const int64_t*>(e.table), shares, chosen,
              inner, e.here, e.first, static_cast<int>(e.top_k), e.activation, router.x, lines(f, e.out)};
    with_kind(e.gate.kind, [&](auto of) {
      constexpr int kKind = decltype(of)::value;
      dim3 inner_grid(static_cast<unsigned>((e.gate.out + kWarps - 1) / kWarps), static_cast<unsigned>(slots));
      expert_inner_kernel<kKind><<<inner_grid, kThreads, 0, queue(stream)>>>(m);
      dim3 outer_grid(static_cast<unsigned>((e.down.out + 2 * kWarps - 1) / (2 * kWarps)), static_cast<unsigned>(rows));
      expert_outer_kernel<kKind><<<outer_grid, kThreads, 0, queue(stream)>>>(m);
    });
    check_launch("experts");
  };
}

}  // namespace ds
