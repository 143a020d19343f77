// What the instruction-set files and shared.cpp agree on: the reduction of several ranks' buffers.
#pragma once
#include "../ops.h"

namespace ds {

enum FoldType : int { FOLD_F32, FOLD_BF16, FOLD_F16, FOLD_F64, FOLD_I64, FOLD_I32, FOLD_I16, FOLD_I8, FOLD_U8 };
enum FoldOp : int { FOLD_SUM, FOLD_PRODUCT, FOLD_MAX, FOLD_MIN, FOLD_AND, FOLD_OR, FOLD_XOR };

// out[i] = parts[0][i] op parts[1][i] op ...; average: a sum divided by `count`, whole numbers towards zero.
using Fold = void (*)(void* out, const void* const* parts, int count, long n, int type, int op, bool average);

extern const Fold fold_generic;
#ifdef DS_X86
extern const Fold fold_avx2;
extern const Fold fold_avx512;
#endif

}  // namespace ds
