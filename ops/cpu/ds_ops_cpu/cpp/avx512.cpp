// x86 with AVX-512 (F, BW, DQ, VL).
#if defined(__x86_64__)
#define DS_AVX512 1
#define DS_ISA avx512
#define DS_NAME "avx512"
#include "isa.h"
#include "shared/fold.h"
#endif
