"""The example of stage 3 with offload runs as its documentation says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

GPT = Path(__file__).parents[3] / "examples" / "gpt"


@pytest.mark.slow
def test_gpt_trains_with_everything_offloaded(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "ds_cli",
        "run",
        "--nproc",
        "2",
        str(GPT / "train.py"),
        "--steps",
        "2",
    ]
    config = GPT / "ds_config_zero3_offload.json"
    done = subprocess.run(
        [*command, "--deepspeed_config", str(config), "--run", str(tmp_path / "run")],
        check=False,
        cwd=tmp_path,
        env={**os.environ, "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found = re.search(r"loss ([\d.]+) after 2 steps", done.stdout)
    assert found is not None, done.stdout
    assert 4.0 < float(found[1]) < 5.6  # ln 256 is 5.55
    assert "what it writes" in done.stdout
    assert (tmp_path / "run" / "latest").read_text().split()[0] == "global_step2"
