// Kernels over rows of a matrix: bias + GELU, dropout, softmax + dropout, layer norm, and sums of columns.
// ds_ops_cuda.formulas says what each means, dropout's random bits included.

#include "common.h"
#include "ops.h"

namespace ds {
namespace {

using In = const void*;
using Out = void*;

// -- random bits -----------------------------------------------------------------------------------------------------

// [Note: dropout without masks] Whether an element stays depends on the seed, its row and its column alone (Philox4x32
// with 10 rounds, one call for four columns). So the backward pass draws the same bits again; no mask is ever stored.
struct Dropout {
  uint64_t seed;
  uint32_t threshold;  // elements whose bits are below are dropped; 0: none are
  float keep_scale;

  __device__ void apply(Pack& x, int64_t row, int64_t col) const {
    if (threshold == 0) return;
    uint32_t c[4] = {static_cast<uint32_t>(col / 4), static_cast<uint32_t>(row), static_cast<uint32_t>(row >> 32), 0};
    uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
#pragma unroll
    for (int round = 0; round < 10; ++round) {
      uint32_t high0 = __umulhi(0xD2511F53u, c[0]), low0 = 0xD2511F53u * c[0];
      uint32_t high1 = __umulhi(0xCD9E8D57u, c[2]), low1 = 0xCD9E8D57u * c[2];
      c[0] = high1 ^ c[1] ^ k0;
      c[1] = low1;
      c[2] = high0 ^ c[3] ^ k1;
      c[3] = low0;
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
    for (int k = 0; k < 4; ++k) x.v[k] = c[k] < threshold ? 0.0f : x.v[k] * keep_scale;
  }
};

// -- element by element ----------------------------------------------------------------------------------------------

struct Gelu {
  bool tanh_form;

  __device__ float value(float x) const {
    if (tanh_form) return 0.5f * x * (1.0f + tanhf(0.7978845608028654f * (x + 0.044715f * x * x * x)));
    return 0.5f * x * (1.0f + erff(x * 0.7071067811865476f));
  }

  __device__ float slope(float x) const {
    if (tanh_form) {
      float t = tanhf(0.7978845608028654f * (x + 0.044715f * x * x * x));
      return 0.5f * (1.0f + t) + 0.5f * x * (1.0f - t * t) * 0.7978845608028654f * (1.0f + 0.134145f * x * x);
    }
    return 0.5f * (1.0f + erff(x * 0.7071067811865476f)) + 0.3989422804014327f * x * expf(-0.5f * x * x);
  }
};

struct Rows {
  int64_t rows, cols;
  int type;
  bool wide;

  __device__ Pack load(In from, int64_t row, int64_t col, float fill = 0.0f) const {
    return ds::load(from, type, row * cols + col, (row + 1) * cols, wide, fill);
  }
  __device__ void store(Out to, int64_t row, int64_t col, const Pack& x) const {
    ds::store(to, type, row * cols + col, (row + 1) * cols, wide, x);
  }
};

// One value for each column.
struct Line {
  In from;
  int type;
  bool wide;

  __device__ Pack load(int64_t col, int64_t cols) const { return ds::load(from, type, col, cols, wide); }
};

struct BiasGelu {
  Gelu gelu;
  In x;
  Line bias;
  Out y;

  __device__ void operator()(const Rows& m, int64_t row, int64_t col) const {
    Pack a = m.load(x, row, col), b = bias.load(col, m.cols);
    for (int k = 0; k < 4; ++k) a.v[k] = gelu.value(a.v[k] + b.v[k]);
    m.store(y, row, col, a);
  }
};

struct BiasGeluBackward {
  Gelu gelu;
  In grad, x;
  Line bias;
  Out dx;

  __device__ void operator()(const Rows& m, int64_t row, int64_t col) const {
    Pack g = m.load(grad, row, col), a = m.load(x, row, col), b = bias.load(col, m.cols);
    for (int k = 0; k < 4; ++k) g.v[k] *= gelu.slope(a.v[k] + b.v[k]);
    m.store(dx, row, col, g);
  }
};

struct BiasDropoutAdd {
  Dropout dropout;
  In x;
  Line bias;
  In residual;
  Out y;

  __device__ void operator()(const Rows& m, int64_t row, int64_t col) const {
    Pack a = m.load(x, row, col), b = bias.load(col, m.cols), r = m.load(residual, row, col);
    for (int k = 0; k < 4; ++k) a.v[k] += b.v[k];
    dropout.apply(a, row, col);
    for (int k = 0; k < 4; ++k) a.v[k] += r.v[k];
    m.store(y, row, col, a);
  }
};

struct OnlyDropout {
  Dropout dropout;
  In x;
  Out y;

  __device__ void operator()(const Rows& m, int64_t row, int64_t col) const {
    Pack a = m.load(x, row, col);
    dropout.apply(a, row, col);
    m.store(y, row, col, a);
  }
};

template <class Work>
__global__ void __launch_bounds__(kThreads) each_pack(Rows m, Work work) {
  int64_t per_row = (m.cols + 3) / 4, packs = m.rows * per_row;
  int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (packs <= 0x7fffffff) {  // 32-bit division is several times as fast
    for (int64_t i = first; i < packs; i += stride) {
      uint32_t row = static_cast<uint32_t>(i) / static_cast<uint32_t>(per_row);
      work(m, row, (i - row * per_row) * 4);
    }
  } else {
    for (int64_t i = first; i < packs; i += stride) work(m, i / per_row, i % per_row * 4);
  }
}

template <class Work>
void run_each(const char* what, Address stream, const Rows& m, const Work& work) {
  int64_t packs = m.rows * ((m.cols + 3) / 4);
  if (packs == 0) return;
  int64_t blocks = (packs + kThreads - 1) / kThreads;
  each_pack<<<blocks < (1 << 20) ? blocks : 1 << 20, kThreads, 0, reinterpret_cast<cudaStream_t>(stream)>>>(m, work);
  check_launch(what);
}

In in(Address address) { return reinterpret_cast<In>(address); }
Out out(Address address) { return reinterpret_cast<Out>(address); }

Rows matrix(int64_t rows, int64_t cols, int type, std::initializer_list<Address> addresses) {
  bool wide = cols % 4 == 0;
  for (Address a : addresses) wide &= is_wide(in(a), type);
  return {rows, cols, type, wide};
}

Line line(Address address, int type) { return {in(address), type, is_wide(in(address), type)}; }

// -- softmax + dropout: a team for each row --------------------------------------------------------------------------

// A tensor that is added to the scores, read where its strides say; those of sizes that it lacks are 0.
struct Mask {
  In from;  // null: nothing is added
  int type;
  int64_t sizes[3], strides[4];  // sizes: of all dims of the scores but the first

  // Where the row's first element is.
  __device__ int64_t start(int64_t row) const {
    int64_t query = row % sizes[1], head = row / sizes[1] % sizes[0], batch = row / sizes[1] / sizes[0];
    return batch * strides[0] + head * strides[1] + query * strides[2];
  }
};

template <int kTeam>
__global__ void __launch_bounds__(kThreads)
    softmax_kernel(Rows m, In x, Mask mask, Out probs, Out dropped, Dropout dropout) {
  int64_t row = team_row<kTeam>();
  if (row >= m.rows) return;  // the whole team
  int64_t offset = mask.from ? mask.start(row) : 0;
  auto scores = [&](int64_t col) {
    Pack p = m.load(x, row, col, -INFINITY);
    if (mask.from) {
      for (int k = 0; k < 4 && col + k < m.cols; ++k) {
        p.v[k] += load_one(mask.from, mask.type, offset + (col + k) * mask.strides[3]);
      }
    }
    return p;
  };
  float highest = -INFINITY;
  for (int64_t col = team_rank<kTeam>() * 4; col < m.cols; col += kTeam * 4) {
    Pack p = scores(col);
    for (int k = 0; k < 4; ++k) highest = Max()(highest, p.v[k]);
  }
  highest = combine<kTeam>(highest, Max());
  float sum = 0.0f;
  for (int64_t col = team_rank<kTeam>() * 4; col < m.cols; col += kTeam * 4) {
    Pack p = scores(col);
    for (int k = 0; k < 4 && col + k < m.cols; ++k) sum += expf(p.v[k] - highest);
  }
  sum = combine<kTeam>(sum, Add());
  for (int64_t col = team_rank<kTeam>() * 4; col < m.cols; col += kTeam * 4) {
    Pack p = scores(col);
    for (int k = 0; k < 4; ++k) p.v[k] = rounded(m.type, expf(p.v[k] - highest) / sum);
    m.store(probs, row, col, p);
    if (dropped) {
      dropout.apply(p, row, col);
      m.store(dropped, row, col, p);
    }
  }
}

template <int kTeam>
__global__ void __launch_bounds__(kThreads) softmax_backward_kernel(Rows m, In grad, In probs, Out dx, Dropout dropout) {
  int64_t row = team_row<kTeam>();
  if (row >= m.rows) return;
  float dot = 0.0f;
  for (int64_t col = team_rank<kTeam>() * 4; col < m.cols; col += kTeam * 4) {
    Pack g = m.load(grad, row, col), p = m.load(probs, row, col);
    dropout.apply(g, row, col);
    for (int k = 0; k < 4; ++k) dot += g.v[k] * p.v[k];
  }
  dot = combine<kTeam>(dot, Add());
  for (int64_t col = team_rank<kTeam>() * 4; col < m.cols; col += kTeam * 4) {
    Pack g = m.load(grad, row, col), p = m.load(probs, row, col);
    dropout.apply(g, row, col);
    for (int k = 0; k < 4; ++k) g.v[k] = p.v[k] * (g.v[k] - dot);
    m.store(dx, row, col, g);
  }
}

// -- layer norm ------------------------------------------------------------------------------------------------------

template <int kTeam>
__global__ void __launch_bounds__(kThreads)
    layer_norm_kernel(Rows m, In x, Line weight, Line bias, Out y, float* means, float* rstds, float eps) {
  int64_t row = team_row<kTeam>();
  if (row >= m.rows) return;
  float cols = static_cast<float>(m.cols), sum = 0.0f, squares = 0.0f;
  for (int64_t col = team_rank<kTeam>() * 4; col < m.cols; col += kTeam * 4) {
    Pack p = m.load(x, row, col);
    for (int k = 0; k < 4; ++k) sum += p.v[k];
  }
  float mean = combine<kTeam>(sum, Add()) / cols;
  for (int64_t col = team_rank<kTeam>() * 4; col < m.cols; col += kTeam * 4) {
    Pack p = m.load(x, row, col, mean);
    for (int k = 0; k < 4; ++k) squares += (p.v[k] - mean) * (p.v[k] - mean);
  }
  float rstd = 1.0f / sqrtf(combine<kTeam>(squares, Add()) / cols + eps);
  for (int64_t col = team_rank<kTeam>() * 4; col < m.cols; col += kTeam * 4) {
    Pack p = m.load(x, row, col), w = weight.load(col, m.cols), b = bias.load(col, m.cols);
    for (int k = 0; k < 4; ++k) p.v[k] = (p.v[k] - mean) * rstd * w.v[k] + b.v[k];
    m.store(y, row, col, p);
  }
  if (team_rank<kTeam>() == 0) {
    means[row] = mean;
    rstds[row] = rstd;
  }
}

// The normalised input, from the input or from the output.
struct Normal {
  In kept;
  Line weight, bias;
  const float *mean, *rstd;
  bool invertible;

  __device__ float one(float kept_one, float w, float b, float row_mean, float row_rstd) const {
    return invertible ? (kept_one - b) / w : (kept_one - row_mean) * row_rstd;
  }
};

template <int kTeam>
__global__ void __launch_bounds__(kThreads) layer_norm_backward_kernel(Rows m, In grad, Normal n, Out dx) {
  int64_t row = team_row<kTeam>();
  if (row >= m.rows) return;
  float mean = n.mean[row], rstd = n.rstd[row], sum = 0.0f, dot = 0.0f;
  for (int64_t col = team_rank<kTeam>() * 4; col < m.cols; col += kTeam * 4) {
    Pack g = m.load(grad, row, col), x = m.load(n.kept, row, col);
    Pack w = n.weight.load(col, m.cols), b = n.bias.load(col, m.cols);
    for (int k = 0; k < 4 && col + k < m.cols; ++k) {
      float slope = g.v[k] * w.v[k];
      sum += slope;
      dot += slope * n.one(x.v[k], w.v[k], b.v[k], mean, rstd);
    }
  }
  sum = combine<kTeam>(sum, Add()) / static_cast<float>(m.cols);
  dot = combine<kTeam>(dot, Add()) / static_cast<float>(m.cols);
  for (int64_t col = team_rank<kTeam>() * 4; col < m.cols; col += kTeam * 4) {
    Pack g = m.load(grad, row, col), x = m.load(n.kept, row, col);
    Pack w = n.weight.load(col, m.cols), b = n.bias.load(col, m.cols);
    for (int k = 0; k < 4; ++k) {
      g.v[k] = rstd * (g.v[k] * w.v[k] - sum - n.one(x.v[k], w.v[k], b.v[k], mean, rstd) * dot);
    }
    m.store(dx, row, col, g);
  }
}

// -- sums of columns -------------------------------------------------------------------------------------------------

constexpr int kColumns = 32, kLanes = kThreads / kColumns;

struct NormSums {  // the gradients of weight and bias
  static constexpr int kValues = 2;
  In grad;
  Normal n;

  __device__ void add(float (&sums)[kValues], const Rows& m, int64_t row, int64_t col) const {
    float g = load_one(grad, m.type, row * m.cols + col), x = load_one(n.kept, m.type, row * m.cols + col);
    float w = 1.0f, b = 0.0f;
    if (n.invertible) {
      w = load_one(n.weight.from, n.weight.type, col);
      b = load_one(n.bias.from, n.bias.type, col);
    }
    sums[0] += g * n.one(x, w, b, n.mean[row], n.rstd[row]);
    sums[1] += g;
  }
};

struct PlainSums {
  static constexpr int kValues = 1;
  In x;

  __device__ void add(float (&sums)[kValues], const Rows& m, int64_t row, int64_t col) const {
    sums[0] += load_one(x, m.type, row * m.cols + col);
  }
};

// blockIdx.x: 32 columns; blockIdx.y: a chunk of the rows.
template <class Sums>
__global__ void __launch_bounds__(kThreads) columns_kernel(Rows m, Sums work, float* sums, bool atomic) {
  constexpr int kValues = Sums::kValues;
  __shared__ float shared[kValues][kLanes][kColumns];
  int lane = threadIdx.x / kColumns, column = threadIdx.x % kColumns;
  int64_t col = static_cast<int64_t>(blockIdx.x) * kColumns + column;
  int64_t per_chunk = (m.rows + gridDim.y - 1) / gridDim.y;
  int64_t end = min((blockIdx.y + 1) * per_chunk, m.rows);
  float mine[kValues] = {};
  if (col < m.cols) {
    for (int64_t row = blockIdx.y * per_chunk + lane; row < end; row += kLanes) work.add(mine, m, row, col);
  }
  for (int v = 0; v < kValues; ++v) shared[v][lane][column] = mine[v];
  __syncthreads();
  if (lane > 0 || col >= m.cols) return;
  for (int v = 0; v < kValues; ++v) {
    float sum = 0.0f;
    for (int l = 0; l < kLanes; ++l) sum += shared[v][l][column];
    if (atomic) {
      atomicAdd(&sums[v * m.cols + col], sum);
    } else {
      sums[(static_cast<int64_t>(blockIdx.y) * kValues + v) * m.cols + col] = sum;
    }
  }
}

template <class Sums>
void run_columns(const char* what, Address stream, const Rows& m, const Sums& work, Address sums, int64_t chunks,
                 bool atomic) {
  if (m.cols == 0) return;
  dim3 grid(static_cast<unsigned>((m.cols + kColumns - 1) / kColumns), static_cast<unsigned>(chunks));
  columns_kernel<<<grid, kThreads, 0, reinterpret_cast<cudaStream_t>(stream)>>>(
      m, work, reinterpret_cast<float*>(sums), atomic);
  check_launch(what);
}

// Calls run(std::integral_constant of the team's size): a warp for short rows, a block for long ones.
template <class Run>
void with_team(const char* what, const Rows& m, Run run) {
  if (m.rows == 0 || m.cols == 0) return;
  if (m.cols <= 1024) {
    run(std::integral_constant<int, 32>(), static_cast<unsigned>(blocks_for(m.rows, 32)));
  } else {
    run(std::integral_constant<int, kThreads>(), static_cast<unsigned>(blocks_for(m.rows, kThreads)));
  }
  check_launch(what);
}

Normal normal(Address kept, Address weight, Address bias, int weight_type, Address mean, Address rstd,
              bool invertible) {
  return {in(kept), line(weight, weight_type), line(bias, weight_type), reinterpret_cast<const float*>(mean),
          reinterpret_cast<const float*>(rstd), invertible};
}

}  // namespace

void bias_gelu_forward(Address stream, int64_t rows, int64_t cols, int type, int bias_type, bool tanh, Address x,
                       Address bias, Address y) {
  BiasGelu work{{tanh}, in(x), line(bias, bias_type), out(y)};
  run_each("bias_gelu", stream, matrix(rows, cols, type, {x, y}), work);
}

void bias_gelu_backward(Address stream, int64_t rows, int64_t cols, int type, int bias_type, bool tanh, Address grad,
                        Address x, Address bias, Address dx) {
  BiasGeluBackward work{{tanh}, in(grad), in(x), line(bias, bias_type), out(dx)};
  run_each("bias_gelu backward", stream, matrix(rows, cols, type, {grad, x, dx}), work);
}

void bias_dropout_add_forward(Address stream, int64_t rows, int64_t cols, int type, int bias_type, Address x,
                              Address bias, Address residual, Address y, uint64_t seed, uint32_t threshold,
                              double keep_scale) {
  Dropout dropout{seed, threshold, float(keep_scale)};
  BiasDropoutAdd work{dropout, in(x), line(bias, bias_type), in(residual), out(y)};
  run_each("bias_dropout_add", stream, matrix(rows, cols, type, {x, residual, y}), work);
}

void dropout(Address stream, int64_t rows, int64_t cols, int type, Address x, Address y, uint64_t seed,
             uint32_t threshold, double keep_scale) {
  OnlyDropout work{{seed, threshold, float(keep_scale)}, in(x), out(y)};
  run_each("dropout", stream, matrix(rows, cols, type, {x, y}), work);
}

void softmax_dropout_forward(Address stream, int64_t rows, int64_t cols, int type, int mask_type, Address x,
                             Address mask, const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides,
                             Address probs, Address dropped, uint64_t seed, uint32_t threshold, double keep_scale) {
  Rows m = matrix(rows, cols, type, {x, probs, dropped});
  Dropout dropout{seed, threshold, float(keep_scale)};
  Mask added{in(mask), mask_type, {}, {}};
  if (mask != 0) {
    for (int d = 0; d < 3; ++d) added.sizes[d] = sizes.at(d + 1);
    for (int d = 0; d < 4; ++d) added.strides[d] = strides.at(d);
  }
  with_team("softmax_dropout", m, [&](auto team, unsigned blocks) {
    softmax_kernel<decltype(team)::value><<<blocks, kThreads, 0, reinterpret_cast<cudaStream_t>(stream)>>>(
        m, in(x), added, out(probs), out(dropped), dropout);
  });
}

void softmax_dropout_backward(Address stream, int64_t rows, int64_t cols, int type, Address grad, Address probs,
                              Address dx, uint64_t seed, uint32_t threshold, double keep_scale) {
  Rows m = matrix(rows, cols, type, {grad, probs, dx});
  Dropout dropout{seed, threshold, float(keep_scale)};
  with_team("softmax_dropout backward", m, [&](auto team, unsigned blocks) {
    softmax_backward_kernel<decltype(team)::value><<<blocks, kThreads, 0, reinterpret_cast<cudaStream_t>(stream)>>>(
        m, in(grad), in(probs), out(dx), dropout);
  });
}

void layer_norm_forward(Address stream, int64_t rows, int64_t cols, int type, int weight_type, Address x,
                        Address weight, Address bias, Address y, Address mean, Address rstd, double eps) {
  Rows m = matrix(rows, cols, type, {x, y});
  with_team("layer_norm", m, [&](auto team, unsigned blocks) {
    layer_norm_kernel<decltype(team)::value><<<blocks, kThreads, 0, reinterpret_cast<cudaStream_t>(stream)>>>(
        m, in(x), line(weight, weight_type), line(bias, weight_type), out(y), reinterpret_cast<float*>(mean),
        reinterpret_cast<float*>(rstd), float(eps));
  });
}

void layer_norm_backward(Address stream, int64_t rows, int64_t cols, int type, int weight_type, bool invertible,
                         Address grad, Address kept, Address weight, Address bias, Address mean, Address rstd,
                         Address dx) {
  Rows m = matrix(rows, cols, type, {grad, kept, dx});
  Normal n = normal(kept, weight, bias, weight_type, mean, rstd, invertible);
  with_team("layer_norm backward", m, [&](auto team, unsigned blocks) {
    layer_norm_backward_kernel<decltype(team)::value>
        <<<blocks, kThreads, 0, reinterpret_cast<cudaStream_t>(stream)>>>(m, in(grad), n, out(dx));
  });
}

void layer_norm_sums(Address stream, int64_t rows, int64_t cols, int type, int weight_type, bool invertible,
                     Address grad, Address kept, Address weight, Address bias, Address mean, Address rstd,
                     Address sums, int64_t chunks, bool atomic) {
  NormSums work{in(grad), normal(kept, weight, bias, weight_type, mean, rstd, invertible)};
  run_columns("layer_norm sums", stream, Rows{rows, cols, type, false}, work, sums, chunks, atomic);
}

void column_sums(Address stream, int64_t rows, int64_t cols, int type, Address x, Address sums, int64_t chunks,
                 bool atomic) {
  run_columns("column_sums", stream, Rows{rows, cols, type, false}, PlainSums{in(x)}, sums, chunks, atomic);
}

}  // namespace ds
