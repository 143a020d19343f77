"""A matrix optimizer of somebody else's, under layouts that it knows nothing of; see own_muon.py."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from ds_testing import OptimizerConformance, run_ranks

HERE = str(Path(__file__).parent)
LOAD = {"plugins": {"load": ["own_muon=own_muon"]}}
LAYOUTS: dict[str, dict[str, Any]] = {
    "z1": {"zero_optimization": {"stage": 1}},
    "z3 offload": {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}},
    "tp": {"tensor_parallel": {"autotp_size": 2}},
    "bf16": {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}},
}

sys.path.insert(0, HERE)


class TestSpectral(OptimizerConformance):
    plugin = "own_muon"
    load = ("own_muon=own_muon",)


def trained(sections: dict[str, Any]) -> tuple[list[float], dict[str, Any]]:
    """Losses of three steps and the weights; each rank trains on the same samples, more than columns:
    of a matrix of lower rank U V^T is not defined.
    """
    import torch
    from ds_testing.truth import whole_weights
    from torch import nn

    import ds_core

    sys.path.insert(0, HERE)
    torch.manual_seed(0)
    model = nn.Sequential()
    model.up_proj = nn.Linear(6, 10)
    model.act = nn.Tanh()
    model.down_proj = nn.Linear(10, 5)
    optimizer = {"type": "Spectral", "params": {"lr": 0.02}}
    config = {"train_micro_batch_size_per_gpu": 16, "optimizer": optimizer, **LOAD, **sections}
    engine, *_ = ds_core.initialize(model=model, config=config)
    dtype = next(engine.module.parameters()).dtype
    losses = []
    for step in range(3):
        x = torch.randn(16, 6, generator=torch.Generator().manual_seed(step)).to(dtype)
        loss = engine(x).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    found = {n: w.tolist() for n, w in whole_weights(engine).items()}
    engine.destroy()
    return losses, found


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_it_trains_as_in_one_process(layout: str) -> None:
    from ds_testing.truth import same

    sections = LAYOUTS[layout]
    alone = {key: value for key, value in sections.items() if key == "bf16"}
    ((losses, weights),) = run_ranks(1, trained, alone)
    for found in run_ranks(2, trained, sections):
        same(found[0], losses, 1e-2 if alone else 1e-5)
        for name, weight in weights.items():
            same(found[1][name], weight, 1e-2 if alone else 1e-5)
