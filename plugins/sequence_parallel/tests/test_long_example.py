"""examples/long learns to copy, on two ranks, across fewer tokens than it does by default."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[3] / "examples" / "long" / "copy_task.py"


@pytest.mark.slow
def test_it_learns_to_copy(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "ds_cli",
        "run",
        "--nproc",
        "2",
        str(EXAMPLE),
        "--length",
        "2048",
    ]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=one_thread,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = re.search(r"copied across 1024 tokens: ([\d.]+)%", done.stdout)
    assert found is not None, done.stdout
    assert float(found[1]) > 99
