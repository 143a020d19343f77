"""Optimizers that need full tensors: checkpoints, and optimizers that have states already."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ds_testing import run_ranks
from torch import Tensor, nn

from plugins.zero.tests.grain_models import (
    GLOBAL,
    LOAD,
    SMALL,
    Net,
    data,
    grained,
    net,
    steps,
    whole,
)


def save(folder: Path, kind: str, dtype: str, stage: int) -> tuple[list[float], dict[str, Tensor]]:
    engine = grained(kind, dtype, stage)
    steps(engine, dtype, range(2))
    engine.save_checkpoint(str(folder), tag="two")
    rest = steps(engine, dtype, range(2, 4))
    found = whole(engine)
    engine.destroy()
    return rest, found


def resume(
    folder: Path, kind: str, dtype: str, stage: int
) -> tuple[list[float], dict[str, Tensor]]:
    engine = grained(kind, dtype, stage, seed=3)
    steps(engine, dtype, range(7, 8))  # the states to be replaced are not empty
    engine.load_checkpoint(str(folder), tag="two")
    rest = steps(engine, dtype, range(2, 4))
    found = whole(engine)
    engine.destroy()
    return rest, found


ROUTES = [
    ((3, 4), (1, 2)),
    ((3, 2), (0, 1)),
    ((0, 1), (3, 4)),
    ((1, 2), (2, 4)),
    ((2, 4), (3, 1)),
    ((0, 2), (1, 4)),
]


@pytest.mark.slow
@pytest.mark.parametrize("route", ROUTES, ids=lambda r: "-".join(f"stage{s}x{w}" for s, w in r))
@pytest.mark.parametrize(
    ("kind", "dtype"), [("lamb", "float64"), ("lamb", "bfloat16"), ("muon", "float64")]
)
def test_any_layout_loads_into_any_other(kind: str, dtype: str, route: Any, tmp_path: Path) -> None:
    (stage, world), (other, other_world) = route
    losses, weights = run_ranks(world, save, tmp_path, kind, dtype, stage)[0]
    again, found = run_ranks(other_world, resume, tmp_path, kind, dtype, other)[0]
    tolerance = 2e-2 if dtype == "bfloat16" else 1e-12
    assert again == pytest.approx(losses, abs=tolerance)
    for key, value in weights.items():
        assert torch.allclose(found[key], value, rtol=0, atol=tolerance), key


def adamw(
    folder: Path, dtype: str, whole_grain: bool, stage: int, *, load: bool
) -> dict[str, Tensor]:
    """AdamW for two steps into a checkpoint and two more, or from it for two; by elements or by
    whole tensors.
    """
    import ds_core
    from ds_core import comm

    model = net(dtype, seed=3 if load else 0)
    engine, *_ = ds_core.initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": 3,
            "gradient_accumulation_steps": GLOBAL // comm.world_size(),
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
            "zero_optimization": {"stage": stage, **SMALL},
            "bf16": {"enabled": dtype == "bfloat16"},
            **(LOAD if whole_grain else {}),
        },
    )
    steps(engine, dtype, range(7, 8) if load else range(2))
    if load:
        engine.load_checkpoint(str(folder), tag="two")
    else:
        engine.save_checkpoint(str(folder), tag="two")
    steps(engine, dtype, range(2, 4))
    assert all(
        b.masters.full_tensors == whole_grain
        for b in engine.partitioner.buckets
        if b.params[0].requires_grad
    )
    found = whole(engine)
    engine.destroy()
    return found


@pytest.mark.fast_cases("whole-to-elements-float64-1e-12")
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [("float64", 1e-12), pytest.param("bfloat16", 2e-2, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("first", [True, False], ids=["whole-to-elements", "elements-to-whole"])
def test_elements_and_whole_tensors_share_checkpoints(
    first: bool, dtype: str, tolerance: float, tmp_path: Path
) -> None:
    expected = run_ranks(4, _save_adamw, tmp_path, dtype, first, 3)[0]
    for stage, world in ((2, 2), (3, 2), (1, 4)):
        found = run_ranks(world, _load_adamw, tmp_path, dtype, not first, stage)[0]
        for name, value in expected.items():
            assert torch.allclose(found[name], value, rtol=0, atol=tolerance), name


def _save_adamw(folder: Path, dtype: str, whole_grain: bool, stage: int) -> dict[str, Tensor]:
    return adamw(folder, dtype, whole_grain, stage, load=False)


def _load_adamw(folder: Path, dtype: str, whole_grain: bool, stage: int) -> dict[str, Tensor]:
    return adamw(folder, dtype, whole_grain, stage, load=True)


def taken_over(cls_name: str, dtype: str, stage: int) -> float:
    """Two plain steps on every rank, then the optimizer, with its states, goes to an engine; the
    worst difference.
    """
    from ds_testing.truth import relative

    import ds_core
    from ds_core import comm
    from plugins.zero.tests import whole_tensors

    cls = torch.optim.AdamW if cls_name == "AdamW" else getattr(whole_tensors, cls_name)

    def plain(count: int) -> tuple[Net, torch.optim.Optimizer]:
        model = net(dtype)
        optimizer = cls(model.parameters(), lr=0.01)
        for step in range(count):
            for index in range(GLOBAL):
                (model(data(dtype, step, index)) / GLOBAL).backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer

    expected, _ = plain(4)
    model, optimizer = plain(2)
    engine, *_ = ds_core.initialize(
        model=model,
        optimizer=optimizer,
        config={
            "train_micro_batch_size_per_gpu": 3,
            "gradient_accumulation_steps": GLOBAL // comm.world_size(),
            "gradient_clipping": 0,
            "zero_optimization": {"stage": stage, **SMALL},
            "zero_allow_untested_optimizer": cls_name != "AdamW",
        },
    )
    assert all(b.masters.full_tensors == (cls_name != "AdamW") for b in engine.partitioner.buckets)
    steps(engine, dtype, range(2, 4))
    found = whole(engine)
    engine.destroy()
    return max(relative(found[n], p.detach()) for n, p in expected.named_parameters())


@pytest.mark.fast_cases(
    "AdamW-1-1", "AdamW-3-2", "Unknown-2-1", "Unknown-3-2", "Adam-1-2", "Adam-3-1", "Adam-2-2"
)
@pytest.mark.parametrize("world", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("cls", ["AdamW", "Unknown", "Adam"])
def test_an_optimizer_with_states_is_taken_over(cls: str, stage: int, world: int) -> None:
    assert max(run_ranks(world, taken_over, cls, "float64", stage)) <= 1e-12


def odd_state() -> str:
    import ds_core
    from ds_core.errors import UsageError

    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.weight]["rows"] = torch.ones(3, 1)
    config = {"train_batch_size": 1, "zero_optimization": {"stage": 1}}
    try:
        ds_core.initialize(model=model, optimizer=optimizer, config=config)
    except UsageError as error:
        return str(error)
    return ""


def test_states_that_cannot_be_cut_are_refused() -> None:
    (told,) = run_ranks(1, odd_state)
    assert "'rows' of parameter 'weight' has shape (3, 1)" in told
