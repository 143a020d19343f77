"""Conversions stream: memory is that of the largest tensor, not of the model."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from ds_testing.processes import clean_environment, run

PROGRAM = Path(__file__).with_name("memory_of_conversions.py")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_memory_is_at_most_twice_the_largest_tensor(tmp_path: Path) -> None:
    # Freed blocks go back to the system at once, or glibc's heap would be measured.
    env = clean_environment(MALLOC_MMAP_THRESHOLD_=str(1 << 20))
    said = run([sys.executable, str(PROGRAM), str(tmp_path)], env=env, timeout=400)
    found = json.loads(said.splitlines()[-1])
    assert len(found["most"]) == 25
    # One MiB for the files' buffers.
    limit = 2 * found["largest"] + (1 << 20)
    over = {pair: size for pair, size in found["most"].items() if size > limit}
    assert not over, f"{over} of {limit}"
