"""Runs of DeepSpeed with pipelines, experts and tensor parallelism are imported, and their losses
go on.

The files below ``deepspeed/parallel/`` are DeepSpeed 0.19.8's own (see recipe.py there).
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from ds_checkpoint_deepspeed.importing import import_checkpoint
from ds_testing import run_ranks

HERE = Path(__file__).parent / "deepspeed" / "parallel"


def recipe() -> Any:
    spec = importlib.util.spec_from_file_location("ds_parallel_recipe", HERE / "recipe.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def go_on(folder: str, kind: str, stage: int, parts: int) -> tuple[int, list[float], Any]:
    """(data-parallel rank, its losses of steps 3 and 4, the client state)."""
    import ds_core
    from ds_core import comm

    made = recipe()
    engine = made.engine_of(ds_core.initialize, kind, stage, parts)
    _, client = engine.load_checkpoint(folder)
    assert engine.global_steps == 3
    count = comm.world_size()
    rank = comm.rank() // parts if kind.startswith("tp") else comm.rank()
    if kind.startswith("pipe"):
        rank = comm.rank() % (count // parts)
    losses = [made.step_of(engine, kind, step, rank) for step in (3, 4)]
    engine.destroy()
    return rank, losses, client


@pytest.mark.fast_cases(
    "pipe-1-pipe-4-1-2",
    "pipe-0-pipe-untied-2-1-2",
    "moe-1-moe-4-2-2",
    "moe-0-moe-2-0-1",
    "tp-3-tp-2-3-1",
)
@pytest.mark.parametrize(
    ("name", "kind", "world", "stage", "parts"),
    [
        ("pipe-1", "pipe", 4, 1, 2),
        ("pipe-1", "pipe", 2, 0, 1),
        ("pipe-0", "pipe-untied", 2, 1, 2),
        ("moe-1", "moe", 4, 2, 2),
        ("moe-0", "moe", 2, 0, 1),
        ("tp-1", "tp", 2, 1, 2),
        ("tp-3", "tp", 2, 3, 1),
    ],
)
def test_its_losses_go_on(
    name: str, kind: str, world: int, stage: int, parts: int, tmp_path: Path
) -> None:
    path, missing = import_checkpoint(HERE / name, tmp_path)
    assert path == tmp_path / "three"
    assert len(missing) == (1 if name == "tp-1" else 0)
    truth = json.loads((HERE / name / "losses.json").read_text())[3:]
    for rank, losses, client in run_ranks(world, go_on, str(tmp_path), kind, stage, parts):
        if rank == 0:
            # A loss of "tp" is a mean of numbers about 1 that nearly cancel: rounding in fp32 is of
            # the size of those, not of the mean's 0.0155 (5e-8 here, where one layout sums two
            # halves of a product and another does not).
            assert losses == pytest.approx(truth, rel=2e-6, abs=2**-22)
        assert client == {"note": "hello"}
