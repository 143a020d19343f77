"""Optimizers that reduce gradients by themselves: what they are asked, what they are given, and the
norm.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from ds_optimizers.plugin import SELF_REDUCED
from ds_testing import run_ranks
from ds_testing.truth import start, train
from torch import nn

from ds_core import comm
from ds_core.entries import OptimizerEntry
from ds_core.errors import UsageError


def ds_optimizers() -> Mapping[str, OptimizerEntry]:
    """This module is its own plugin."""
    return {
        "Local": OptimizerEntry(f"{__name__}:Local", partitioner=SELF_REDUCED),
        "Mute": OptimizerEntry("torch.optim:SGD", partitioner=SELF_REDUCED),
    }


class Local(torch.optim.SGD):
    """SGD on averages in even steps; in odd ones each rank by itself."""

    count = 0
    seen: list[float]

    @property
    def takes_averages(self) -> bool:
        return self.count % 2 == 0

    def connect(self, group_of: Any) -> None:
        self.group_of = group_of
        self.seen = []
        self.events = []

    def synchronize(self) -> None:
        self.events.append("synchronize")

    def loaded(self) -> None:
        self.events.append("loaded")

    def step(self, closure: Any = None) -> None:
        (param,) = self.param_groups[0]["params"]
        self.seen.append(float(param.grad[0, 0]))
        self.ranks = comm.world_size(self.group_of(param))
        self.count += 1


def engine_of(kind: str, model: nn.Module, **config: Any) -> Any:
    optimizer = {"type": kind, "params": {"lr": 0.1}}
    return start(model, micro=1, optimizer=optimizer, **{"plugins": {"load": [__name__]}, **config})


def norms_and_events(folder: str, direct: bool, clip: float) -> dict[str, Any]:
    engine = engine_of("Local", nn.Linear(1, 1, bias=False), gradient_clipping=clip)
    norms: list[float | None] = []
    train(
        engine,
        lambda step, rank: torch.tensor([[3.0 if rank == 0 else 4.0]]),
        4,
        loss=lambda model, x: model(x).sum(),
        direct=direct,
        after=lambda _: norms.append(engine.get_global_grad_norm()),
    )
    engine.save_checkpoint(folder, tag="a")
    engine.load_checkpoint(folder, tag="a")
    found = engine.optimizer
    engine.destroy()
    return {"norms": norms, "seen": found.seen, "events": found.events, "ranks": found.ranks}


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_gradients_are_averaged_when_the_optimizer_wants_that(
    tmp_path: Any, plain: bool, clip: float
) -> None:
    for rank, found in enumerate(run_ranks(2, norms_and_events, str(tmp_path), plain, clip)):
        root = ((9 + 16) / 2) ** 0.5  # of the mean square of 3 and 4
        assert found["norms"] == pytest.approx([3.5, root, 3.5, root])
        own = 3.0 + rank
        expected = [3.5, own, 3.5, own] if not clip else [1.0, own / root, 1.0, own / root]
        assert found["seen"] == pytest.approx(expected, rel=1e-5)
        assert found["events"][0] == "synchronize" and found["events"][-1] == "loaded"
        assert found["ranks"] == 2


def test_what_is_declared_to_reduce_must_be_able_to() -> None:
    with pytest.raises(UsageError, match="SGD is declared to reduce.*takes_averages"):
        engine_of("Mute", nn.Linear(1, 1))
