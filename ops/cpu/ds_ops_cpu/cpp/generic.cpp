// Any processor: vectors of four floats that the compiler turns into what there is.
#define DS_ISA generic
#define DS_NAME "generic"
#include "isa.h"
#include "shared/fold.h"
