"""Divided models under torch.compile: one graph, and the same numbers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from ds_testing import run_ranks

sys.path.insert(0, str(Path(__file__).parent))

from tp_models import hugging_face, ids, settings


def compiled(kind: str, tp: int, keys: dict[str, Any]) -> dict[str, float]:
    import torch

    import ds_core

    engines = [
        ds_core.initialize(model=hugging_face(kind).float(), config=settings(tp, **keys))[0]
        for _ in range(2)
    ]
    eager, other = (engine.module for engine in engines)
    batch = ids(0, 0)
    losses = []
    for run in (eager, torch.compile(other, backend="aot_eager", fullgraph=True)):
        loss = run(input_ids=batch, labels=batch).loss
        loss.backward()
        losses.append(loss.item())
    torch.compiler.reset()
    pairs = zip(eager.parameters(), other.parameters(), strict=True)
    off = {
        "gradients": max(float((a.grad - b.grad).abs().max()) for a, b in pairs),
        "loss": losses[0] - losses[1],
    }
    for engine in engines:
        engine.destroy()
    return off


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "tp", "keys"),
    [
        ("llama", 2, {}),
        ("gpt2", 2, {"tp_overlap_comm": True}),
        ("llama", 2, {"sequence_parallel": True}),
        ("few", 3, {}),
    ],
    ids=["llama", "gpt2", "tokens", "few"],
)
def test_one_graph(kind: str, tp: int, keys: dict[str, Any]) -> None:
    for off in run_ranks(tp, compiled, kind, tp, keys):
        assert max(map(abs, off.values())) < 1e-6, off
