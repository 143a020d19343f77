"""transformers models, unchanged, with their sequences divided: losses, weights and logits of one
process.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import pytest
import sp_models as m
from ds_testing import run_ranks
from ds_testing.truth import difference

FAST = [
    ["llama", "ulysses", {}],
    ["llama", "ring", {"kind": "padded", "attention": "sdpa"}],
    ["gpt2", "auto", {"kind": "packed", "section": {"tiled_loss": {"shards": 2}}}],
    ["bloom", "auto", {"kind": "padded"}],
    ["routed", "auto", {"kind": "padded"}],
    ["strict", "auto", {"section": {"tiled_loss": {"shards": 2}}}],
]
SLOW = [
    [family, mode, {"kind": kind, "attention": attention, "steps": 10}]
    for family in m.FAMILIES
    for mode in ("ulysses", "ring")
    for kind in ("plain", "padded", "packed")
    for attention in ("sdpa", "eager")
    # the library's eager softmax is in fp32, the ring's in fp64
    if not (mode == "ring" and attention == "eager")
    if not (family == "bloom" and (mode == "ring" or kind == "packed" or attention == "sdpa"))
]
SLOW += [
    ["routed", mode, {"kind": kind, "attention": "sdpa"}]
    for mode in ("ulysses", "ring")
    for kind in ("plain", "padded")
]


def check(ranks: int, cases: list[Any]) -> None:
    for found in run_ranks(ranks, m.differences, cases):
        for case, (loss, weights, logits) in zip(cases, found, strict=True):
            # transformers computes losses, norms and softmax in fp32
            assert loss < 1e-6, (case, loss, weights, logits)
            assert weights < 1e-6, (case, loss, weights, logits)
            assert logits < 1e-6, (case, loss, weights, logits)


def test_two_ranks() -> None:
    pytest.importorskip("transformers")
    check(2, FAST)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("family", [*m.FAMILIES, "routed"])
def test_each_family(family: str, ranks: int) -> None:
    pytest.importorskip("transformers")
    check(ranks, [case for case in SLOW if case[0] == family])


def compiled(mode: str) -> list[float]:
    """How far losses and weights of blocks under torch.compile are off, and how many graph breaks
    there are.
    """
    import torch

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    one = m.alone("llama", attention="sdpa")
    section = {"size": 2, "mode": mode}
    mine = m.trained(
        "llama", {"sequence_parallel": section, "compile": {}}, attention="sdpa", compiled=True
    )
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    breaks = torch._dynamo.utils.counters["graph_break"]
    worst = difference(mine[1], one[1])
    return [
        difference(mine[0], one[0]),
        worst,
        graphs,
        sum(breaks.values()),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ulysses", "ring"])
def test_compiled_blocks_are_whole_graphs(mode: str) -> None:
    pytest.importorskip("transformers")
    for loss, weights, graphs, breaks in run_ranks(2, compiled, mode):
        assert loss < 1e-6
        assert weights < 1e-12
        assert (graphs > 0, breaks) == (True, 0)
