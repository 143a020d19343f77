"""Features that look for layers, on stages of a pipeline: the whole model is asked, and stages
equal one process.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from ds_pipeline import LayerSpec, PipelineModule
from ds_testing import run_ranks
from torch import Tensor, nn

import ds_core

WIDTH = 6
LENGTH = 8
STEPS = 3


class Block(nn.Module):
    def __init__(self, inner: str) -> None:
        super().__init__()
        self.inner = inner
        self.add_module(inner, nn.Linear(WIDTH, WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + torch.tanh(self.get_submodule(self.inner)(hidden))


class Last(nn.Module):
    """One of a kind, and on the last stage only."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.out(hidden)  # type: ignore[no-any-return]


def quantised(pattern: str) -> dict[str, Any]:
    params = {"start_bits": 8, "target_bits": 4, "quantization_period": 1}
    group = {"params": params, "modules": [pattern]}
    shared = {"enabled": True, "schedule_offset": 0}
    return {
        "compression_training": {
            "weight_quantization": {"shared_parameters": shared, "different_groups": {"a": group}}
        }
    }


def recomputed(name: str) -> dict[str, Any]:
    return {"activation_checkpointing": {"modules": name if name == "auto" else [name]}}


def tiled(*names: str) -> dict[str, Any]:
    return {"sequence_parallel": {"tiled_mlp": {"modules": list(names), "shards": 2}}}


HELD = {
    "quantised first": quantised("up"),
    "quantised last": quantised("out"),
    "recomputed blocks": recomputed("auto"),
    "recomputed last": recomputed("Last"),
    "tiled": tiled("Last"),
}
REFUSED = {
    "quantised": (quantised("nothing"), "'nothing' matches no"),
    "recomputed": (recomputed("Nothing"), "'Nothing'"),
    "tiled": (tiled("Nothing"), "'Nothing'"),
    "tiled by their names": (tiled(), "is called an MLP"),
    "sparse": ({"sparse_attention": {"mode": "fixed"}}, "SparseSelfAttention"),
}


def engine_of(stages: int, config: dict[str, Any]) -> Any:
    """An engine whose first stage has the blocks but one, each called by its inner layer."""
    specs = [LayerSpec(Block, name) for name in ("up", "middle", "down")] + [LayerSpec(Last)]
    options: dict[str, Any] = {"seed_layers": True, "base_seed": 3, "partition_method": "uniform"}
    model = PipelineModule(
        specs, num_stages=stages, loss_fn=nn.functional.mse_loss, **options
    ).double()
    model.seed_layers = False  # nothing in forward is random by torch
    adam = {"type": "Adam", "params": {"lr": 0.01}}
    return ds_core.initialize(
        model=model, config={"train_batch_size": 2, "optimizer": adam, **config}
    )[0]


def losses(stages: int, case: str) -> list[float]:
    engine = engine_of(stages, HELD[case])
    found = []
    for step in range(STEPS):
        x = torch.randn(
            2, LENGTH, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(step)
        )
        found.append(float(engine.train_batch(iter([(x, x.sin())]))))
    engine.destroy()
    return found


def refused(stages: int, case: str) -> tuple[str, float]:
    began = time.perf_counter()
    try:
        engine_of(stages, REFUSED[case][0])
    except ds_core.errors.DSError as error:
        return f"{error}", time.perf_counter() - began
    return "went on", 0.0


@pytest.mark.fast_cases("quantised last", "recomputed blocks", "tiled")
@pytest.mark.parametrize("case", HELD)
def test_a_stage_may_have_none_of_the_layers(case: str) -> None:
    (alone,) = run_ranks(1, losses, 1, case)
    assert run_ranks(2, losses, 2, case, timeout=60.0) == [pytest.approx(alone, rel=1e-12)] * 2


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_stage_has_is_refused_by_all(case: str) -> None:
    for text, seconds in run_ranks(2, refused, 2, case, timeout=60.0):
        assert REFUSED[case][1] in text
        assert seconds < 20


@pytest.mark.slow
@pytest.mark.parametrize("case", HELD)
def test_four_stages_of_one_layer(case: str) -> None:
    (alone,) = run_ranks(1, losses, 1, case)
    assert run_ranks(4, losses, 4, case, timeout=60.0) == [pytest.approx(alone, rel=1e-12)] * 4
