"""Checkpoints of 4 stages go on with 2, with 1 and in plain torch as if nothing had happened."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from ds_checkpoint import get_fp32_state_dict_from_zero_checkpoint
from ds_checkpoint.offline import open_saved
from ds_testing import run_ranks
from ds_testing.truth import plain, start
from pipe_models import MICRO, Plain, batch, pipeline

GAS = 2
ADAMW = {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}}


def engine_of(stages: int | None, chunks: int, zero: int) -> Any:
    """An engine of so many stages; None: of the plain module."""
    model = Plain() if stages is None else pipeline(stages, chunks)
    with torch.no_grad():  # what is loaded must not have been there before
        for param in model.parameters():
            param.add_(1.0)
    section = {"stage": zero, "reduce_bucket_size": 300, "param_persistence_threshold": 8}
    return start(model, micro=MICRO, gas=GAS, clip=1.0, optimizer=ADAMW, zero_optimization=section)


def steps(engine: Any, begin: int, end: int) -> list[float]:
    dp = engine.ctx.mesh.size("dp")
    index = engine.ctx.mesh.index("dp")
    micros = GAS // dp  # the same samples, whatever the number of data ranks
    engine.set_train_batch_size(MICRO * micros * dp)
    rows = [
        [batch(step, index * micros + m, 0) for m in range(micros)] for step in range(begin, end)
    ]
    return [engine.train_batch(iter(row)).item() for row in rows]


def saves(folder: Path, stages: int, chunks: int, zero: int) -> list[float]:
    engine = engine_of(stages, chunks, zero)
    losses = steps(engine, 0, 2)
    engine.save_checkpoint(str(folder), tag="here")
    losses += steps(engine, 2, 4)
    engine.save_checkpoint(str(folder), tag="end", save_latest=False)
    engine.destroy()
    return losses


def goes_on(folder: Path, stages: int | None, chunks: int, zero: int, tag: str) -> list[float]:
    engine = engine_of(stages, chunks, zero)
    engine.load_checkpoint(str(folder), tag="here")
    assert engine.global_steps == 2
    losses = steps(engine, 2, 4)
    engine.save_checkpoint(str(folder), tag=tag, save_latest=False)
    engine.destroy()
    return losses


def truth() -> tuple[list[float], dict[str, torch.Tensor]]:
    model = Plain()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1.0)
    losses = plain(
        model, lambda step, m: batch(step, m, 0), 4, count=GAS, clip=1.0, optimizer=ADAMW
    )
    return losses, model.state_dict()


@pytest.mark.fast_cases("first3-3")
@pytest.mark.parametrize(
    ("first", "zero"),
    [
        ((4, 4, 1), 0),
        pytest.param((4, 4, 2), 1, marks=pytest.mark.slow),
        pytest.param((4, 2, 1), 2, marks=pytest.mark.slow),
        ((4, 2, 2), 3),
    ],
)
def test_a_checkpoint_goes_on_with_any_number_of_stages(
    first: tuple[int, int, int], zero: int, tmp_path: Path
) -> None:
    losses, weights = truth()
    world, stages, chunks = first
    for told in run_ranks(world, saves, tmp_path, stages, chunks, zero):
        assert told == pytest.approx(losses, rel=1e-12)
    targets = [
        (2, 2, 1, 1),
        (4, 2, 2, 0),
        (4, 4, 1, 3),
        (1, 1, 1, 0),
        (1, None, 1, 2),
        (2, None, 1, 3),
    ]
    for number, (ranks, stage_count, parts, target) in enumerate(targets):
        for told in run_ranks(
            ranks, goes_on, tmp_path, stage_count, parts, target, f"again{number}"
        ):
            assert told == pytest.approx(losses[2:], rel=1e-12), (ranks, stage_count, parts, target)
        whole = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path), tag=f"again{number}")
        assert set(whole) == set(weights)
        assert all(torch.allclose(whole[n].double(), w, rtol=1e-6) for n, w in weights.items())
        with open_saved(tmp_path, "end") as end, open_saved(tmp_path, f"again{number}") as other:
            assert set(end.source.names()) == set(other.source.names())


def test_plain_torch_takes_the_weights(tmp_path: Path) -> None:
    run_ranks(4, saves, tmp_path, 4, 1, 0)
    model = Plain()
    (_, weights) = truth()
    model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(str(tmp_path), tag="end"))
    for name, value in model.state_dict().items():
        assert torch.allclose(value, weights[name], rtol=1e-6), name
