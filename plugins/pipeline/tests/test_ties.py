"""Tied weights that are frozen and thawed, and that the user has hooks on, against plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ds_pipeline import LayerSpec, PipelineModule, TiedLayerSpec
from ds_testing import run_ranks
from torch import Tensor, nn

import ds_core
from ds_core import comm
from ds_core.errors import UsageError

WORDS = 11
WIDTH = 6
LR = 0.1
CASES = ["plain", "hook before", "hook after", "thawed", "frozen and thawed"]


def _project(module: Any, h: Tensor) -> Tensor:
    return h @ module.weight.t()


def _loss(out: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(out.flatten(0, 1), labels.flatten())


def _data(step: int, index: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + index)
    return tuple(torch.randint(0, WORDS, (2, 2, 5), generator=generator))  # type: ignore[return-value]


class _Truth(nn.Module):
    def __init__(self, weight: Tensor, middle: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Parameter(weight.detach().clone())
        self.middle = middle

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.middle(nn.functional.embedding(x, self.embed))
        return h @ self.embed.t()


def _half(grad: Tensor) -> Tensor:
    return grad * 0.5


def _prepare(case: str, weight: nn.Parameter, *, begun: bool) -> None:
    """What the user does to the tied weight before `initialize`, and when training has begun."""
    if case == ("hook after" if begun else "hook before"):
        weight.register_hook(_half)
    if case == "thawed":
        weight.requires_grad_(begun)


def _trains(case: str, stage: int) -> tuple[float, Tensor]:
    """How far this copy is from plain torch after three steps, and the copy."""
    torch.manual_seed(0)
    embed = TiedLayerSpec("e", nn.Embedding, WORDS, WIDTH)
    head = TiedLayerSpec("e", nn.Embedding, WORDS, WIDTH, forward_fn=_project)
    model = PipelineModule(
        [embed, LayerSpec(nn.Linear, WIDTH, WIDTH), head],
        num_stages=2,
        loss_fn=_loss,
        partition_method="uniform",
        seed_layers=True,
    ).double()
    weight = model.tied["e"].weight
    with torch.random.fork_rng():
        torch.manual_seed(model.base_seed + 1)  # of layer 1
        truth = _Truth(weight, nn.Linear(WIDTH, WIDTH)).double()
    for copy in (weight, truth.embed):
        _prepare(case, copy, begun=False)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "SGD", "params": {"lr": LR, "momentum": 0.9}},
    }
    engine, *_ = ds_core.initialize(
        model=model, model_parameters=list(model.parameters()), config=config
    )
    optimizer = torch.optim.SGD(truth.parameters(), lr=LR, momentum=0.9)
    for copy in (weight, truth.embed):
        _prepare(case, copy, begun=True)
    ranks = engine.ctx.mesh.size("dp")
    index = engine.ctx.mesh.index("dp")
    for step in range(3):
        for copy in (weight, truth.embed):
            copy.requires_grad_(case != "frozen and thawed" or step != 1)
        engine.train_batch(iter([_data(2 * step + micro, index) for micro in range(2)]))
        for micro in range(2):
            for rank in range(ranks):
                x, y = _data(2 * step + micro, rank)
                (_loss(truth(x), y) / 2 / ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
    ours = _whole(weight)
    engine.destroy()
    return (ours - truth.embed).abs().max().item(), ours


def _whole(weight: nn.Parameter) -> Tensor:
    from ds_access import safe_get_full_fp32_param

    found: Tensor = safe_get_full_fp32_param(weight)
    return found


def trains(stage: int) -> list[tuple[float, Tensor]]:
    return [_trains(case, stage) for case in CASES]


@pytest.mark.fast_cases("4-0")
@pytest.mark.parametrize(
    ("world", "stage"),
    [(2, 0), (4, 0), (2, 3), *(pytest.param(4, s, marks=pytest.mark.slow) for s in (1, 2, 3))],
)
def test_ties_train_as_one_weight(world: int, stage: int) -> None:
    ranks = run_ranks(world, trains, stage)
    for case, copies in zip(CASES, zip(*ranks, strict=True), strict=True):
        for off, copy in copies:
            assert torch.equal(copy, copies[0][1]), f"{case}: the copies drift apart"
            assert off < 1e-14, f"{case}: {off:.3g} from plain torch"


def thaws_on_one_stage() -> list[str]:
    """What each rank says: thawed on the last stage alone; then the weight in the optimizer of one
    stage alone.
    """
    said = []
    for case in ("thawed", "left out"):
        specs = [
            TiedLayerSpec("e", nn.Linear, 3, 3),
            LayerSpec(nn.Linear, 3, 3),
            TiedLayerSpec("e", nn.Linear, 3, 3),
        ]
        model = PipelineModule(
            specs, num_stages=3, loss_fn=nn.functional.mse_loss, partition_method="uniform"
        )
        tied = "e" in model.tied
        if tied and case == "thawed":
            model.tied["e"].weight.requires_grad_(False)
        given = list(model.parameters())
        if tied and case == "left out" and comm.rank() == 0:
            given = [model.tied["e"].bias]
        config = {"train_batch_size": 2, "optimizer": {"type": "SGD", "params": {"lr": LR}}}
        engine, *_ = ds_core.initialize(model=model, model_parameters=given, config=config)
        if tied and case == "thawed" and comm.rank() == 2:
            model.tied["e"].weight.requires_grad_(True)
        with pytest.raises(UsageError) as error:
            engine.train_batch(iter([(torch.ones(2, 3), torch.ones(2, 3))]))
        said.append(str(error.value))
        engine.destroy()
    return said


def test_copies_that_would_drift_apart_are_refused_on_every_rank() -> None:
    """Also on the stage between, which has no copy, and would wait for the others."""
    for thawed, left_out in run_ranks(3, thaws_on_one_stage, timeout=60.0):
        assert "'tied.e.weight' are frozen on stage 0, trained on stage 2" in thawed
        assert (
            "'tied.e.weight' are left out of the optimizer on stage 0, trained on stage 2"
            in left_out
        )
