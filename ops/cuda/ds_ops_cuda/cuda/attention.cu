// Attention of few rows, each with all that its sequence has in the paged cache: a sequence is cut into splits, whose
// results are put together by their highest scores. One block takes a row, a split, and up to four heads that read the
// same keys; so keys and values are read once.

#include "eight.h"

namespace ds {
namespace {

constexpr int kBlock = 32;  // tokens of a block of the cache: ds_inference_kit.step.BLOCK
constexpr int kTeam = 128;  // threads of a block
constexpr int kMost = 256;  // dims of a head

struct Attending {
  Lines q, k, v, out;
  const char *keys, *values;  // of the layer; null: k and v themselves
  int64_t heads, kv_heads, dim;
  int64_t most, blocks, window;
  float scale;
  bool causal;
  int type;  // of keys and values
  const float* slopes;
  const int32_t *heads_of, *sequence, *limit, *length, *first, *table, *attended;
  int64_t tasks;
  int splits;
  float* partials;  // [rows, heads, splits, dim + 2]

  // Where the head's numbers of token `at` begin in the cache, or in k and v.
  __device__ int64_t place(int64_t row, int64_t at, int64_t head) const {
    if (!keys) return (first[row] + at) * k.stride + head * dim;
    int64_t block = table[sequence[row] * most + at / kBlock];
    block = min(max(block, int64_t{0}), blocks - 1);
    return ((block * kv_heads + head) * kBlock + at % kBlock) * dim;
  }
};

// What a group of lanes has seen of one head: the highest score, the sum of weights, the sum of values.
struct Seen {
  float highest = -INFINITY, sum = 0.0f;
  Eight values = {};

  __device__ void add(float score, const Eight& v) {
    if (score > highest) {
      float factor = expf(highest - score);
      sum *= factor;
#pragma unroll
      for (int i = 0; i < 8; ++i) values.v[i] *= factor;
      highest = score;
    }
    float weight = expf(score - highest);
    sum += weight;
#pragma unroll
    for (int i = 0; i < 8; ++i) values.v[i] += weight * v.v[i];
  }
};

// kLanes lanes have a key, eight dims each; kHeads query heads read it.
template <int kLanes, int kHeads>
__global__ void __launch_bounds__(kTeam) attend_kernel(const __grid_constant__ Attending a) {
  constexpr int kGroups = kTeam / kLanes;
  __shared__ float highest[kGroups][kHeads], sum[kGroups][kHeads], values[kGroups][kHeads][kLanes * 8];
  int64_t row = a.attended ? a.attended[blockIdx.y] : blockIdx.y;
  int64_t task = blockIdx.x / a.splits, split = blockIdx.x % a.splits, kv_head = a.heads_of[a.tasks * kHeads + task];
  // Tokens are counted in the cache, or among the sequence's rows of this step.
  int64_t own = a.keys ? a.limit[row] - 1 : row - a.first[row];
  int64_t end = own + 1 + (a.causal ? 0 : a.length[row] - a.limit[row]);
  if (a.keys) end = min(end, a.most * kBlock);
  int64_t begin = a.window ? max(own - a.window + 1, int64_t{0}) : 0;
  int64_t per_split = (end - begin + a.splits - 1) / a.splits;
  per_split = (per_split + kBlock - 1) / kBlock * kBlock;
  begin += split * per_split;
  end = min(end, begin + per_split);

  int group = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  int64_t d = lane * 8;
  bool there = d < a.dim;
  Eight q[kHeads];
  Seen seen[kHeads];
  float slope[kHeads];
  for (int h = 0; h < kHeads; ++h) {
    int64_t head = max(a.heads_of[task * kHeads + h], 0);
    Raw raw{};
    if (there) raw = read_eight(a.q.data, a.q.type, row * a.q.stride + head * a.dim + d);
    q[h] = meant(raw, a.q.type);
    for (int i = 0; i < 8; ++i) q[h].v[i] *= a.scale;
    slope[h] = a.slopes ? a.slopes[head] : 0.0f;
  }
  const void* keys = a.keys ? static_cast<const void*>(a.keys) : a.k.data;
  const void* values_from = a.keys ? static_cast<const void*>(a.values) : a.v.data;
  int64_t shift = a.keys ? 0 : a.v.stride - a.k.stride;  // per token, where v's rows are not as long as k's
#pragma unroll 2
  for (int64_t base = begin; base < end; base += kGroups) {  // the same for all lanes of a warp
    int64_t at = base + group;
    bool valid = at < end;
    int64_t place = a.place(row, valid ? at : begin, kv_head) + d;
    int64_t place_v = place + (a.first[row] + (valid ? at : begin)) * shift;
    Raw raw_k{}, raw_v{};
    if (there) {
      raw_k = read_eight(keys, a.type, place);
      raw_v = read_eight(values_from, a.type, place_v);
    }
    Eight k = meant(raw_k, a.type), v = meant(raw_v, a.type);
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      float score = 0.0f;
#pragma unroll
      for (int i = 0; i < 8; ++i) score += q[h].v[i] * k.v[i];
#pragma unroll
      for (int step = kLanes / 2; step > 0; step /= 2) score += __shfl_xor_sync(0xffffffffu, score, step);
      if (valid) seen[h].add(score + slope[h] * static_cast<float>(at - own), v);
    }
  }
  for (int h = 0; h < kHeads; ++h) {
    highest[group][h] = seen[h].highest;
    sum[group][h] = seen[h].sum;
    for (int i = 0; i < 8; ++i) values[group][h][d + i] = seen[h].values.v[i];
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kHeads * a.dim; i += kTeam) {
    int h = i / static_cast<int>(a.dim), col = i % static_cast<int>(a.dim), head = a.heads_of[task * kHeads + h];
    if (head < 0) continue;
    float top = -INFINITY, weight = 0.0f, value = 0.0f;
    for (int g = 0; g < kGroups; ++g) top = Max()(top, highest[g][h]);
    for (int g = 0; g < kGroups; ++g) {
      if (sum[g][h] == 0.0f) continue;  // no token: its highest score is not a number to subtract
      float factor = expf(highest[g][h] - top);
      weight += sum[g][h] * factor;
      value += values[g][h][col] * factor;
    }
    if (a.splits == 1) {
      a.out.set(row, head * a.dim + col, value / weight);
      continue;
    }
    float* to = a.partials + ((blockIdx.y * a.heads + head) * a.splits + split) * (a.dim + 2);
    to[2 + col] = value;
    if (col == 0) to[0] = top, to[1] = weight;
  }
}

// A block for each row and head puts the splits together.
__global__ void __launch_bounds__(kTeam) join_kernel(const __grid_constant__ Attending a) {
  int64_t row = a.attended ? a.attended[blockIdx.y] : blockIdx.y, head = blockIdx.x;
  const float* from = a.partials + (blockIdx.y * a.heads + head) * a.splits * (a.dim + 2);
  float top = -INFINITY;
  for (int s = 0; s < a.splits; ++s) top = Max()(top, from[s * (a.dim + 2)]);
  for (int64_t col = threadIdx.x; col < a.dim; col += kTeam) {
    float weight = 0.0f, value = 0.0f;
    for (int s = 0; s < a.splits; ++s) {
      const float* one = from + s * (a.dim + 2);
      if (one[1] == 0.0f) continue;
      float factor = expf(one[0] - top);
      weight += one[1] * factor;
      value += one[2 + col] * factor;
    }
    a.out.set(row, head * a.dim + col, value / weight);
  }
}

template <int kLanes>
void launch_heads(const Attending& a, int per_task, dim3 grid, Address stream) {
  if (per_task == 1) {
    attend_kernel<kLanes, 1><<<grid, kTeam, 0, queue(stream)>>>(a);
  } else {
    attend_kernel<kLanes, 4><<<grid, kTeam, 0, queue(stream)>>>(a);
  }
}

const int32_t* ints(Address address) { return reinterpret_cast<const int32_t*>(address); }

}  // namespace

Launch attend(const Attention& t, int64_t blocks) {
  if (t.head_dim > kMost || t.head_dim % 8) throw std::runtime_error("heads of more than 256 dims, or not of eights");
  return [=](const Frame& f, Address stream) {
    int64_t rows = f.attended ? f.attended_rows : f.rows;
    if (rows == 0) return;
    Attending a{};
    a.q = lines(f, t.q), a.k = lines(f, t.k), a.v = lines(f, t.v), a.out = lines(f, t.out);
    a.type = f.type;
    if (t.layer >= 0 && f.keys) {
      a.type = f.cache_type;
      int64_t bytes = t.layer * f.cache_blocks * t.kv_heads * kBlock * t.head_dim * (a.type == kFloat ? 4 : 2);
      a.keys = reinterpret_cast<const char*>(f.keys) + bytes;
      a.values = reinterpret_cast<const char*>(f.values) + bytes;
    }
    a.heads = t.heads, a.kv_heads = t.kv_heads, a.dim = t.head_dim;
    a.most = f.most, a.blocks = f.cache_blocks, a.window = t.window;
    a.scale = static_cast<float>(t.scale);
    a.causal = t.causal;
    a.slopes = reinterpret_cast<const float*>(t.slopes);
    a.heads_of = ints(t.heads_of), a.sequence = ints(f.sequence), a.limit = ints(f.limit), a.length = ints(f.length);
    a.first = ints(f.first), a.table = ints(f.blocks), a.attended = ints(f.attended);
    a.tasks = t.tasks;
    // In the step itself sequences are short.
    a.splits = a.keys ? static_cast<int>(splits_for(rows, t.tasks, blocks)) : 1;
    a.partials = reinterpret_cast<float*>(f.scratch);
    dim3 grid(static_cast<unsigned>(t.tasks * a.splits), static_cast<unsigned>(rows));
    if (a.dim <= 64) launch_heads<8>(a, t.per_task, grid, stream);
    else if (a.dim <= 128) launch_heads<16>(a, t.per_task, grid, stream);
    else launch_heads<32>(a, t.per_task, grid, stream);
    check_launch("attention");
    if (a.splits == 1) return;
    join_kernel<<<dim3(static_cast<unsigned>(t.heads), static_cast<unsigned>(rows)), kTeam, 0, queue(stream)>>>(a);
    check_launch("attention, splits");
  };
}

}  // namespace ds
