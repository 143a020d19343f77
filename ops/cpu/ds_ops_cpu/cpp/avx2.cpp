// x86 with AVX2, FMA and F16C.
#if defined(__x86_64__)
#define DS_AVX2 1
#define DS_ISA avx2
#define DS_NAME "avx2"
#include "isa.h"
#include "shared/fold.h"
#endif
