"""The exchange of rows beside an engine: what overlaps with it, and experts that change their input."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))

import moe_models as m
from ds_moe import MoE
from ds_testing import run_ranks


def overlapping() -> tuple[list[str], list[str]]:
    """What happens between rows' departure and arrival, forward and backward."""
    import ds_moe.dispatch as module

    import ds_core

    seen: list[str] = []
    layer = MoE(m.HIDDEN, m.expert(), m.NUM, ep_size=2, k=2, use_residual=True, drop_tokens=False)
    begin = module._Exchange.begin
    end = module._Exchange.end

    def noted_begin(self: Any, *arguments: Any) -> Tensor:
        seen.append("depart")
        return begin(self, *arguments)

    def noted_end(self: Any) -> Tensor:
        seen.append("arrive")
        return end(self)

    engine = ds_core.initialize(model=layer, config={"train_micro_batch_size_per_gpu": 8})[0]
    layer.mlp.register_forward_hook(lambda *_: seen.append("dense"))
    layer.experts.register_forward_hook(lambda *_: seen.append("experts"))
    layer.mlp.register_full_backward_hook(lambda *_: seen.append("dense"))
    layer.experts.register_full_backward_pre_hook(lambda *_: seen.append("experts"))
    module._Exchange.begin = noted_begin  # type: ignore[method-assign]
    module._Exchange.end = noted_end  # type: ignore[method-assign]
    try:
        out = engine(torch.randn(8, m.HIDDEN, requires_grad=True))[0]
        forward = seen.copy()
        seen.clear()
        engine.backward(out.sum())
    finally:
        module._Exchange.begin = begin  # type: ignore[method-assign]
        module._Exchange.end = end  # type: ignore[method-assign]
    engine.destroy()
    return forward, seen


def test_the_dense_branch_runs_while_rows_travel() -> None:
    for forward, backward in run_ranks(2, overlapping):
        assert forward == ["depart", "dense", "arrive", "experts", "depart", "arrive"]
        assert backward == ["depart", "arrive", "experts", "depart", "dense", "arrive"]


def in_place() -> float:
    """An expert that changes its input, one on each rank."""
    import ds_core

    torch.manual_seed(1)
    expert = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(m.HIDDEN, m.HIDDEN))
    layer = MoE(m.HIDDEN, expert, 2, ep_size=2, drop_tokens=False)
    assert layer.experts.way == "grouped"
    engine = ds_core.initialize(model=layer, config={"train_micro_batch_size_per_gpu": 8})[0]
    torch.manual_seed(engine.ctx.rank)
    x = torch.randn(8, m.HIDDEN, requires_grad=True)
    out, _, _ = engine(x)
    engine.backward(out.sum())
    with torch.no_grad():
        gate = layer.gate.wg(x).softmax(1).max(1).values  # both experts are copies of one
        off = float((out - gate[:, None] * expert(x.clone())).abs().max())
    engine.destroy()
    assert x.grad is not None
    return off


def test_an_expert_may_change_its_input() -> None:
    assert max(run_ranks(2, in_place)) < 1e-6
