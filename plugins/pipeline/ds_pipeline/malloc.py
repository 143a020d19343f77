"""How much freed memory glibc keeps between micro-batches (torch-free)."""

from __future__ import annotations

import ctypes
import os
import sys

# The numbers of mallopt's parameters in <malloc.h>.
_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3


def tune_malloc() -> None:
    """Let glibc keep up to 1 GB of freed memory, instead of paging it in anew for every
    micro-batch.

    By itself it gives back what lies idle beyond 128 KB to 64 MB (mallopt(3)). Measured: 5 % of a
    step of 200 ms with 64 MB, another 1 to 2 % with this.
    """
    # Other C libraries, such as musl, have no mallopt.
    keep = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    # Whoever says in the environment what to keep has decided.
    decided = any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ)
    if keep is not None and not decided:
        for parameter, size in ((_MMAP_THRESHOLD, 32 << 20), (_TRIM_THRESHOLD, 1 << 30)):
            keep(ctypes.c_int(parameter), ctypes.c_int(size))
