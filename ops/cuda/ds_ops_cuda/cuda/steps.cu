// Optimizer steps and accumulation: one pass over memory, any number of tensors. ds_kernel_kit.references says what
// each means. LAMB takes two passes, with every tensor's trust ratio worked out between them on the device.

#include "table.h"

namespace ds {
namespace {

__device__ inline float lerp(float from, float to, float weight) {  // as torch's: exact at both ends
  return weight < 0.5f ? from + weight * (to - from) : to - (to - from) * (1.0f - weight);
}

// An update has `reads` and `writes`, bits by list (the last list, copies, gets what the first is after the update),
// and changes x: one element of each list.

struct Adam {
  static constexpr unsigned reads = 0b1111, writes = 0b1101;
  float scale, decay, keep, take1, beta2, take2, correction2, eps, size;
  bool decoupled;

  __device__ void operator()(float (&x)[kLists]) const {
    float g = x[1] * scale;
    if (decoupled) x[0] *= keep; else g += decay * x[0];
    x[2] = lerp(x[2], g, take1);
    x[3] = beta2 * x[3] + take2 * g * g;
    x[0] -= size * x[2] / (sqrtf(x[3] / correction2) + eps);
  }
};

struct Adagrad {
  static constexpr unsigned reads = 0b0111, writes = 0b0101;
  float scale, lr, eps, decay;

  __device__ void operator()(float (&x)[kLists]) const {
    float g = x[1] * scale + decay * x[0];
    x[2] += g * g;
    x[0] -= lr * g / (sqrtf(x[2]) + eps);
  }
};

struct Lion {
  static constexpr unsigned reads = 0b0111, writes = 0b0101;
  float scale, lr, keep, take1, take2;

  __device__ void operator()(float (&x)[kLists]) const {
    float g = x[1] * scale, ahead = lerp(x[2], g, take1);
    float sign = static_cast<float>((ahead > 0.0f) - (ahead < 0.0f));  // 0 for NaN, as torch.sign has it
    x[0] = keep * x[0] - lr * sign;
    x[2] = lerp(x[2], g, take2);
  }
};

struct Sgd {
  static constexpr unsigned reads = 0b0111, writes = 0b0101;
  float scale, lr, momentum, take, decay;
  bool has_momenta, nesterov, first;

  __device__ void operator()(float (&x)[kLists]) const {
    float g = x[1] * scale + decay * x[0];
    if (has_momenta) {
      x[2] = first ? g : momentum * x[2] + take * g;
      g = nesterov ? g + momentum * x[2] : x[2];
    }
    x[0] -= lr * g;
  }
};

struct Accumulate {
  static constexpr unsigned reads = 0b0011, writes = 0b0001;
  float scale;

  __device__ void operator()(float (&x)[kLists]) const { x[0] += scale * x[1]; }
};

__device__ inline bool all_wide(const Table& table, int place) {
  bool wide = true;
  for (int l = 0; l < kLists; ++l) {
    if (table.type[l] != kNone) wide &= is_wide(table.address[l][place], table.type[l]);
  }
  return wide;
}

template <unsigned kReads>
__device__ void load_row(Pack (&row)[kLists], const Table& table, const Piece& piece, int64_t i, bool wide) {
#pragma unroll
  for (int l = 0; l < kLists; ++l) {
    if ((kReads >> l & 1) && table.type[l] != kNone) {
      row[l] = load(table.address[l][piece.place], table.type[l], i, piece.end, wide);
    }
  }
}

template <unsigned kWrites>
__device__ void store_row(const Pack (&row)[kLists], const Table& table, const Piece& piece, int64_t i, bool wide) {
#pragma unroll
  for (int l = 0; l < kLists; ++l) {
    if ((kWrites >> l & 1) && table.type[l] != kNone) {
      store(table.address[l][piece.place], table.type[l], i, piece.end, wide, row[l]);
    }
  }
  if (table.type[kLists - 1] != kNone) {
    store(table.address[kLists - 1][piece.place], table.type[kLists - 1], i, piece.end, wide, row[0]);
  }
}

template <class Update>
__global__ void __launch_bounds__(kThreads) step_kernel(const __grid_constant__ Table table, Update update) {
  Piece piece = piece_of(table, blockIdx.x);
  bool wide = all_wide(table, piece.place);
  for (int64_t i = piece.begin + threadIdx.x * 4; i < piece.end; i += kThreads * 4) {
    Pack row[kLists] = {};
    load_row<Update::reads>(row, table, piece, i, wide);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      float x[kLists] = {row[0].v[k], row[1].v[k], row[2].v[k], row[3].v[k], 0.0f};
      update(x);
#pragma unroll
      for (int l = 0; l < 4; ++l) row[l].v[k] = x[l];
    }
    store_row<Update::writes>(row, table, piece, i, wide);
  }
}

template <class Update>
void launch(const char* what, Address stream, const Sizes& sizes, const int (&types)[kLists], const Lists& lists,
            Update update) {
  std::vector<const Addresses*> present;
  for (int l = 0; l < kLists; ++l) present.push_back(types[l] == kNone ? nullptr : &lists.at(l));
  for_each_table(sizes, types, present, [&](const Table& table, size_t, int64_t) {
    step_kernel<<<table.first[table.count], kThreads, 0, reinterpret_cast<cudaStream_t>(stream)>>>(table, update);
    check_launch(what);
  });
}

// -- LAMB ------------------------------------------------------------------------------------------------------------

struct Lamb {
  float scale, take1, beta2, take2, eps, decay, size;
  bool eps_inside_sqrt;
  double min_coeff, max_coeff;

  // The update of one element, from the moments as they are stored.
  __device__ float direction(float p, float m, float v) const {
    return m / (eps_inside_sqrt ? sqrtf(v + eps) : sqrtf(v) + eps) + decay * p;
  }
};

__global__ void __launch_bounds__(kThreads)
    lamb_moments(const __grid_constant__ Table table, Lamb lamb, double* partials) {
  Piece piece = piece_of(table, blockIdx.x);
  bool wide = all_wide(table, piece.place);
  double squares[2] = {0, 0};
  for (int64_t i = piece.begin + threadIdx.x * 4; i < piece.end; i += kThreads * 4) {
    Pack row[kLists] = {};
    load_row<0b1111>(row, table, piece, i, wide);
    for (int k = 0; k < 4; ++k) {
      float g = row[1].v[k] * lamb.scale;
      float& m = row[2].v[k];
      float& v = row[3].v[k];
      m = rounded(table.type[2], lerp(m, g, lamb.take1));
      v = rounded(table.type[3], lamb.beta2 * v + lamb.take2 * g * g);
      if (i + k < piece.end) {
        double p = row[0].v[k], u = lamb.direction(row[0].v[k], m, v);
        squares[0] += p * p;
        squares[1] += u * u;
      }
    }
    for (int l = 2; l < 4; ++l) store(table.address[l][piece.place], table.type[l], i, piece.end, wide, row[l]);
  }
  for (int s = 0; s < 2; ++s) {
    double sum = combine<kThreads>(squares[s], Add());
    if (threadIdx.x == 0) partials[2 * static_cast<int64_t>(blockIdx.x) + s] = sum;
  }
}

// One block for each tensor.
__global__ void __launch_bounds__(kThreads)
    lamb_coeffs(const __grid_constant__ Table table, Lamb lamb, const double* partials, float* coeffs) {
  double norms[2];
  for (int s = 0; s < 2; ++s) {
    double sum = 0;
    for (uint32_t b = table.first[blockIdx.x] + threadIdx.x; b < table.first[blockIdx.x + 1]; b += kThreads) {
      sum += partials[2 * static_cast<int64_t>(b) + s];
    }
    norms[s] = sqrt(combine<kThreads>(sum, Add()));
  }
  if (threadIdx.x == 0) {
    double coeff = 1;
    if (norms[0] != 0 && norms[1] != 0) {
      coeff = norms[0] / norms[1];  // what is not a number stays so
      if (coeff < lamb.min_coeff) coeff = lamb.min_coeff;
      if (coeff > lamb.max_coeff) coeff = lamb.max_coeff;
    }
    coeffs[blockIdx.x] = static_cast<float>(coeff);
  }
}

__global__ void __launch_bounds__(kThreads)
    lamb_apply(const __grid_constant__ Table table, Lamb lamb, const float* coeffs) {
  Piece piece = piece_of(table, blockIdx.x);
  bool wide = all_wide(table, piece.place);
  float size = lamb.size * coeffs[piece.place];
  for (int64_t i = piece.begin + threadIdx.x * 4; i < piece.end; i += kThreads * 4) {
    Pack row[kLists] = {};
    load_row<0b1101>(row, table, piece, i, wide);
    for (int k = 0; k < 4; ++k) {
      row[0].v[k] -= size * lamb.direction(row[0].v[k], row[2].v[k], row[3].v[k]);
    }
    store_row<0b0001>(row, table, piece, i, wide);
  }
}

}  // namespace

void adam(Address stream, const Sizes& sizes, Types t, const Lists& lists, double scale, double lr, double beta1,
          double beta2, double eps, double weight_decay, bool decoupled, double correction1, double correction2) {
  Adam update{float(scale), float(weight_decay), float(1 - lr * weight_decay), float(1 - beta1), float(beta2),
              float(1 - beta2), float(correction2), float(eps), float(lr / correction1), decoupled};
  launch("adam", stream, sizes, {t.param, t.grad, t.state, t.state, t.copy}, lists, update);
}

void adagrad(Address stream, const Sizes& sizes, Types t, const Lists& lists, double scale, double lr, double eps,
             double weight_decay) {
  Adagrad update{float(scale), float(lr), float(eps), float(weight_decay)};
  launch("adagrad", stream, sizes, {t.param, t.grad, t.state, kNone, t.copy}, lists, update);
}

void lion(Address stream, const Sizes& sizes, Types t, const Lists& lists, double scale, double lr, double beta1,
          double beta2, double weight_decay) {
  Lion update{float(scale), float(lr), float(1 - lr * weight_decay), float(1 - beta1), float(1 - beta2)};
  launch("lion", stream, sizes, {t.param, t.grad, t.state, kNone, t.copy}, lists, update);
}

void sgd(Address stream, const Sizes& sizes, Types t, const Lists& lists, double scale, double lr, double momentum,
         double one_minus_dampening, double weight_decay, bool nesterov, bool first) {
  Sgd update{float(scale), float(lr), float(momentum), float(one_minus_dampening), float(weight_decay),
             t.state != kNone, nesterov, first};
  launch("sgd", stream, sizes, {t.param, t.grad, t.state, kNone, t.copy}, lists, update);
}

void accumulate(Address stream, const Sizes& sizes, int type, const Lists& lists, double scale) {
  launch("accumulate", stream, sizes, {kFloat, type, kNone, kNone, kNone}, lists, Accumulate{float(scale)});
}

void lamb(Address stream, const Sizes& sizes, Types t, const Lists& lists, Address partials, Address coeffs,
          double scale, double size, double beta1, double beta2, double eps, bool eps_inside_sqrt,
          double weight_decay, double min_coeff, double max_coeff) {
  Lamb numbers{float(scale), float(1 - beta1), float(beta2), float(1 - beta2), float(eps), float(weight_decay),
               float(size), eps_inside_sqrt, min_coeff, max_coeff};
  const int types[kLists] = {t.param, t.grad, t.state, t.state, t.copy};
  std::vector<const Addresses*> present;
  for (int l = 0; l < kLists; ++l) present.push_back(types[l] == kNone ? nullptr : &lists.at(l));
  auto queue = reinterpret_cast<cudaStream_t>(stream);
  for_each_table(sizes, types, present, [&](const Table& table, size_t start, int64_t blocks_before) {
    uint32_t blocks = table.first[table.count];
    double* sums = reinterpret_cast<double*>(partials) + 2 * blocks_before;
    float* ratios = reinterpret_cast<float*>(coeffs) + start;
    lamb_moments<<<blocks, kThreads, 0, queue>>>(table, numbers, sums);
    lamb_coeffs<<<table.count, kThreads, 0, queue>>>(table, numbers, sums, ratios);
    lamb_apply<<<blocks, kThreads, 0, queue>>>(table, numbers, ratios);
    check_launch("lamb");
  });
}

}  // namespace ds
