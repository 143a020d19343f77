// The calls that module.cpp gives to Python; every address is of the device's memory, `stream` a cudaStream_t.
#pragma once

#include <cstdint>
#include <vector>

namespace ds {

using Address = uintptr_t;
using Addresses = std::vector<Address>;
using Sizes = std::vector<int64_t>;

// Elements that one block takes of a tensor; lamb and squared_norm need room for partial sums of every block.
constexpr int64_t kChunk = 8192;

// Types of parameters, gradients, states and copies, kNone for what is not there.
struct Types {
  int param, grad, state, copy;
};

// Parameters, gradients, up to two states, copies; empty for what is not there.
using Lists = std::vector<Addresses>;

void adam(Address stream, const Sizes&, Types, const Lists&, double scale, double lr, double beta1, double beta2,
          double eps, double weight_decay, bool decoupled, double correction1, double correction2);
void adagrad(Address stream, const Sizes&, Types, const Lists&, double scale, double lr, double eps,
             double weight_decay);
void lion(Address stream, const Sizes&, Types, const Lists&, double scale, double lr, double beta1, double beta2,
          double weight_decay);
void sgd(Address stream, const Sizes&, Types, const Lists&, double scale, double lr, double momentum,
         double one_minus_dampening, double weight_decay, bool nesterov, bool first);
// partials: two fp64 per block; coeffs: one fp32 per tensor, written.
void lamb(Address stream, const Sizes&, Types, const Lists&, Address partials, Address coeffs, double scale,
          double size, double beta1, double beta2, double eps, bool eps_inside_sqrt, double weight_decay,
          double min_coeff, double max_coeff);
void accumulate(Address stream, const Sizes&, int type, const Lists&, double scale);
// partials: one fp64 per block; total: one fp64, written.
void squared_norm(Address stream, const Sizes&, const std::vector<int>& types, const Addresses&, Address partials,
                  Address total);

void quantize(Address stream, int64_t numel, int type, Address x, int64_t group, int bits, bool symmetric, Address q,
              Address scales, Address lows);
void dequantize(Address stream, int64_t numel, int type, Address out, int64_t group, int bits, Address q,
                Address scales, Address lows);

// Rows of symmetrically quantised values, added up: as values of `type`, or quantised again where there are out_scales.
void dequantize_sum(Address stream, int64_t numel, int64_t group, int bits, int64_t rows, Address q, int64_t q_step,
                    Address scales, int64_t scales_step, int type, Address out, Address out_scales);

// Rows of `cols` elements. weight_type: of weight and bias. sums: fp32 [chunks, values, cols], or [values, cols] that
// starts as zeros where `atomic`.
void bias_gelu_forward(Address stream, int64_t rows, int64_t cols, int type, int bias_type, bool tanh, Address x,
                       Address bias, Address y);
void bias_gelu_backward(Address stream, int64_t rows, int64_t cols, int type, int bias_type, bool tanh, Address grad,
                        Address x, Address bias, Address dx);
void bias_dropout_add_forward(Address stream, int64_t rows, int64_t cols, int type, int bias_type, Address x,
                              Address bias, Address residual, Address y, uint64_t seed, uint32_t threshold,
                              double keep_scale);
void dropout(Address stream, int64_t rows, int64_t cols, int type, Address x, Address y, uint64_t seed,
             uint32_t threshold, double keep_scale);
void softmax_dropout_forward(Address stream, int64_t rows, int64_t cols, int type, int mask_type, Address x,
                             Address mask, const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides,
                             Address probs, Address dropped, uint64_t seed, uint32_t threshold, double keep_scale);
void softmax_dropout_backward(Address stream, int64_t rows, int64_t cols, int type, Address grad, Address probs,
                              Address dx, uint64_t seed, uint32_t threshold, double keep_scale);
void layer_norm_forward(Address stream, int64_t rows, int64_t cols, int type, int weight_type, Address x,
                        Address weight, Address bias, Address y, Address mean, Address rstd, double eps);
// kept: the input, or where `invertible` the output, from which the normalised input is worked out.
void layer_norm_backward(Address stream, int64_t rows, int64_t cols, int type, int weight_type, bool invertible,
                         Address grad, Address kept, Address weight, Address bias, Address mean, Address rstd,
                         Address dx);
void layer_norm_sums(Address stream, int64_t rows, int64_t cols, int type, int weight_type, bool invertible,
                     Address grad, Address kept, Address weight, Address bias, Address mean, Address rstd,
                     Address sums, int64_t chunks, bool atomic);
void column_sums(Address stream, int64_t rows, int64_t cols, int type, Address x, Address sums, int64_t chunks,
                 bool atomic);

}  // namespace ds
