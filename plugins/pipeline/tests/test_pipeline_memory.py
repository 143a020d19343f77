"""Freed memory stays with the process, so that micro-batches need not page it in anew."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import resource
import torch
from ds_pipeline.malloc import tune_malloc

tune_malloc()
def work():
    return [torch.ones(1 << 18) for _ in range(200)]  # 200 MB
work()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
work()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(**more: str) -> int:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=kept | more, capture_output=True, text=True, check=True
    )
    return int(done.stdout)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_freed_memory_is_kept_unless_the_environment_says_otherwise() -> None:
    assert page_faults() < 10_000  # of 51,200 pages
    assert page_faults(MALLOC_MMAP_THRESHOLD_=str(1 << 16)) > 20_000
