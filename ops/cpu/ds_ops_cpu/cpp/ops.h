// What the instruction-set files (isa.h compiled three times) and the driver (module.cpp) agree on.
//
// An instruction-set file holds only functions over one block of at most BLOCK elements (the steps of adam, adagrad, lion
// and sgd: of any length), and uses nothing of the standard library: a template that was compiled with AVX-512 must never be the one that the linker keeps for all.
#pragma once

#if defined(__x86_64__)
#define DS_X86 1
#endif

namespace ds {

enum Type : int { F32 = 0, BF16 = 1, F16 = 2, F64 = 3, NONE = 4 };

// Elements per block. A block of every operand in fp32 (4 x 4 KiB) stays in the first-level cache.
constexpr long BLOCK = 1024;

// Elements per call of a step whose elements do not meet. Setting out anew for every BLOCK cost 3 % of a step in fp32.
constexpr long SPAN = 16 * BLOCK;

// Elements that a norm adds side by side.
constexpr int LANES = 64;

// Types of parameters, gradients, optimizer states and the copy that is written out; stream: past the cache.
struct Types {
    int param, grad, state, copy;
    bool stream;
};

// A piece of one tensor: parameters, gradients, up to two states and the 16-bit copy of the new parameters.
struct Block {
    void* param;
    const void* grad;
    void* first;
    void* second;
    void* copy;
    long n;
};

// Every factor that does not depend on the element, worked out in fp64 by the caller.
struct AdamFactors {
    float scale, l2, keep, one_minus_beta1, beta2, one_minus_beta2, inverse_correction2, eps, step_size;
};
struct AdagradFactors {
    float scale, l2, eps, step_size;
};
struct LionFactors {
    float scale, keep, one_minus_beta1, one_minus_beta2, lr;
};
struct SgdFactors {
    float scale, l2, momentum, fresh, lr;
    bool nesterov, first;  // first: momenta begin as the gradient
};
struct LambFactors {
    float scale, beta1, one_minus_beta1, beta2, one_minus_beta2, eps, decay;
    bool eps_inside;
};

struct Table {
    const char* name;
    void (*adam)(const Block&, const Types&, const AdamFactors&);
    void (*adagrad)(const Block&, const Types&, const AdagradFactors&);
    void (*lion)(const Block&, const Types&, const LionFactors&);
    void (*sgd)(const Block&, const Types&, const SgdFactors&);
    // The moments; returns the squared norms of the parameters and of the update.
    void (*lamb_moments)(const Block&, const Types&, const LambFactors&, double* param_norm, double* update_norm);
    // param -= step * update, with the update worked out again from the moments.
    void (*lamb_apply)(const Block&, const Types&, const LambFactors&, float step);
    double (*squared_norm)(const void* x, int type, long n);
    void (*accumulate)(float* into, const void* x, int type, float scale, long n);
    void (*quantize)(const void* x, int type, long n, int bits, bool symmetric, void* out, float* scale, float* low);
    void (*dequantize)(const void* q, int bits, float scale, const float* low, void* out, int type, long n);
    // into = or += what symmetrically quantised values stand for.
    void (*add_quantized)(const void* q, int bits, float scale, bool first, float* into, long n);
    void (*narrow)(void* to, const float* from, int type, long n);  // fp32 is copied
    void (*finish)();  // makes streamed stores visible to other threads
};

extern const Table generic;
#ifdef DS_X86
extern const Table avx2;
extern const Table avx512;
#endif

}  // namespace ds
