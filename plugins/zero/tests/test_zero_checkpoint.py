"""A checkpoint of any stage and world size goes on in any other, as if nothing had happened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ds_testing import run_ranks
from ds_testing.models import Case, build_model, micro_batch
from ds_testing.truth import start
from torch import Tensor

CASES = {
    "plain": Case(),
    "bf16": Case(dtype="bfloat16", model="shared"),
    "frozen": Case(model="frozen"),
}
GLOBAL = 4  # micro-batches per step over all ranks, at any world size


def section(stage: int) -> dict[str, Any]:
    if stage == 0:
        return {}
    small = {"reduce_bucket_size": 100, "param_persistence_threshold": 6}
    return {"zero_optimization": {"stage": stage, **small}}


def engine_of(name: str, stage: int, **extra: Any) -> Any:
    from ds_core import comm

    case = CASES[name]
    sections = {**case.config(comm.world_size()), **section(stage)}
    sections["gradient_accumulation_steps"] = GLOBAL // comm.world_size()
    if extra:
        sections["zero_optimization"] = {**sections["zero_optimization"], **extra}
    return start(build_model(case, seed=comm.rank()), **sections)


def steps(engine: Any, name: str, which: range) -> list[float]:
    from ds_core import comm

    losses = []
    for step in which:
        total = torch.zeros((), dtype=torch.float64)
        for micro in range(GLOBAL // comm.world_size()):
            batch = micro_batch(CASES[name], step, 0, micro * comm.world_size() + comm.rank())
            loss = engine(**batch)
            total += loss.detach().double() / GLOBAL
            engine.backward(loss)
            engine.step()
        comm.all_reduce(total)
        losses.append(total.item())
    return losses


def whole(engine: Any) -> dict[str, Tensor]:
    from ds_testing.truth import whole_weights

    found: dict[str, Tensor] = whole_weights(engine)
    return found


def save(folder: Path, name: str, stage: int) -> tuple[list[float], dict[str, Tensor]]:
    engine = engine_of(name, stage)
    steps(engine, name, range(2))
    engine.save_checkpoint(str(folder), tag="two")
    rest = steps(engine, name, range(2, 4))
    found = whole(engine)
    engine.destroy()
    return rest, found


def resume(folder: Path, name: str, stage: int) -> tuple[list[float], dict[str, Tensor]]:
    engine = engine_of(name, stage)
    steps(engine, name, range(7, 8))  # the states to be replaced are not empty
    path, _ = engine.load_checkpoint(str(folder), tag="two")
    assert path is not None
    assert engine.global_steps == 2
    rest = steps(engine, name, range(2, 4))
    found = whole(engine)
    engine.destroy()
    return rest, found


ROUTES = [
    ((3, 4), (1, 2)),
    ((3, 4), (0, 1)),
    ((1, 2), (3, 4)),
    ((2, 2), (2, 4)),
    ((0, 1), (3, 2)),
    ((3, 2), (3, 4)),
]


@pytest.mark.fast_cases("plain-stage3x4-stage0x1", "plain-stage0x1-stage3x2")
@pytest.mark.parametrize(
    ("name", "route"),
    [("plain", r) for r in ROUTES]
    + [pytest.param(n, r, marks=pytest.mark.slow) for n in ("bf16", "frozen") for r in ROUTES[:3]],
    ids=lambda v: v if isinstance(v, str) else "-".join(f"stage{s}x{w}" for s, w in v),
)
def test_any_layout_loads_into_any_other(name: str, route: Any, tmp_path: Path) -> None:
    (stage, world), (other, other_world) = route
    losses, weights = run_ranks(world, save, tmp_path, name, stage)[0]
    again, found = run_ranks(other_world, resume, tmp_path, name, other)[0]
    tolerance = 2e-2 if name == "bf16" else 1e-12
    assert again == pytest.approx(losses, abs=tolerance)
    for key, value in weights.items():
        assert torch.allclose(found[key], value, rtol=0, atol=tolerance), key


def check_masters(folder: Path) -> dict[str, float]:
    """How far the masters are from the 16-bit weights after loading with and without the stored
    fp32 ones.
    """
    engine = engine_of("bf16", 2)
    steps(engine, "bf16", range(2))
    engine.save_checkpoint(str(folder), tag="t")
    engine.destroy()
    far = {}
    for from_fp32 in (True, False):
        engine = engine_of("bf16", 2, load_from_fp32_weights=from_fp32)
        engine.load_checkpoint(str(folder), tag="t")
        buckets = engine.partitioner.buckets
        far[str(from_fp32)] = max(
            float((b.masters.flat - b.weights.shard.float()).abs().max()) for b in buckets
        )
        engine.destroy()
    return far


def test_load_from_fp32_weights(tmp_path: Path) -> None:
    for far in run_ranks(2, check_masters, tmp_path):
        assert far["False"] == 0.0
        assert far["True"] > 0.0


def save_16bit(folder: Path, stage: int, section: dict[str, Any]) -> tuple[bool, dict[str, Tensor]]:
    engine = engine_of("plain", stage, **section)
    written = engine.save_16bit_model(str(folder))
    found = whole(engine)
    engine.destroy()
    return written, found


KEY = "stage3_gather_16bit_weights_on_model_save"


def test_the_16bit_model_of_stage_3_is_not_written_where_the_config_says_so(tmp_path: Path) -> None:
    assert [written for written, _ in run_ranks(2, save_16bit, tmp_path, 3, {KEY: False})] == [
        False,
        False,
    ]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("stage, section", [(3, {}), (3, {KEY: True}), (2, {KEY: False})], ids=str)
def test_the_16bit_model_is_written(stage: int, section: dict[str, Any], tmp_path: Path) -> None:
    from safetensors.torch import load_file

    written, weights = run_ranks(2, save_16bit, tmp_path, stage, section)[0]
    assert written is True
    saved = load_file(tmp_path / "model.safetensors")
    for name, value in weights.items():
        assert torch.equal(saved[name], value.to(torch.bfloat16)), name
