"""examples/moe trains on two ranks, shows the experts' load, and goes on in one process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[3] / "examples" / "moe" / "gpt.py"


def run(folder: Path, *words: str, nproc: int = 2) -> str:
    command = [sys.executable, "-m", "ds_cli", "run", "--nproc", str(nproc), str(EXAMPLE), *words]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command,
        cwd=folder,
        env=one_thread,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_example_trains_and_shows_the_load(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    first = re.search(r"loss ([\d.]+)\n", run(tmp_path, "--steps", "2"))
    told = run(tmp_path, "--steps", "6", "--ep", "1", nproc=1)
    last = re.findall(r"loss ([\d.]+)", told)
    assert first is not None
    assert "resumed from step 2" in told
    assert float(last[-1]) < float(first[1]) < 5.8  # ln 256 is 5.55
    found: dict[str, list[float]] = {}
    for file in (tmp_path / "runs").rglob("events.out.tfevents.*"):
        events = EventAccumulator(str(file)).Reload()
        for name in events.Tags()["scalars"]:
            found.setdefault(name, []).extend(e.value for e in events.Scalars(name))
    loads = [found[f"Train/MoE/blocks.0.moe/expert_load_{i}"] for i in range(8)]
    assert [sum(x) / 8 for x in zip(*loads, strict=True)] == pytest.approx([1.0] * 6, rel=1e-5)
    assert all(0 <= x < 1 for x in found["Train/MoE/blocks.2.moe/dropped"])
    assert all(x > 0.9 for x in found["Train/MoE/blocks.2.moe/aux_loss"])  # 1 is even
