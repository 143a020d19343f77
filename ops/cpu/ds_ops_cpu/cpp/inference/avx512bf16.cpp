// x86 with AVX-512 (F, BW, DQ, VL) and products of bf16 and, as all that have those, of bytes (VNNI).
#if defined(__x86_64__)
#define DS_AVX512 1
#define DS_BF16 1
#define DS_ISA avx512bf16
#define DS_NAME "avx512bf16"
#include "kernels.h"
#endif
