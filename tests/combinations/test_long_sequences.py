"""What makes long sequences fit, all at once: recomputed blocks, tiles, divided sequences; equal to
one process.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "plugins" / "sequence_parallel" / "tests"))

import sp_models as m
from ds_testing import run_ranks
from ds_testing.truth import difference

LAYERS = 2
STEPS = 2
EPS = 1e-3
"""Of AdamW.

With 1e-8, gradients of 1e-5 whose last bits differ (losses are fp32) move weights by 4e-6.
"""
TILES = {"tiled_mlp": {"shards": 2}, "tiled_loss": {"shards": 3}}


def errors_and_runs(
    family: str, stage: int, tiles: Any, options: dict[str, Any]
) -> tuple[list[float], dict[str, int]]:
    """How far losses, weights and logits are from those of one process; how often modules ran, by
    class.
    """
    from torch.nn.modules.module import register_module_forward_hook

    truth = m.alone(family, steps=STEPS, **options)
    runs: Counter[str] = Counter()
    hook = register_module_forward_hook(
        lambda module, args, out: runs.update([type(module).__name__])
    )
    try:
        sections = {
            "activation_checkpointing": {"modules": "auto"},
            "sequence_parallel": {"size": 2, **tiles},
            "zero_optimization": {"stage": stage},
        }
        mine = m.trained(family, sections, steps=STEPS, **options)
    finally:
        hook.remove()
    return [difference(a, b) for a, b in zip(mine, truth, strict=True)], dict(runs)


def check(family: str, stage: int, attention: str, tiles: Any, **options: Any) -> dict[str, int]:
    """On two ranks: equal, and each block ran twice in each step. Gives how often modules ran."""
    runs: dict[str, int] = {}
    for found, runs in run_ranks(2, errors_and_runs, family, stage, tiles, {"eps": EPS, **options}):
        assert max(found) < 1e-6, found  # transformers computes losses, norms and softmax in fp32
        assert runs[attention] == 2 * LAYERS * STEPS
    return runs


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, pytest.param(0, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "kind", ["plain", *(pytest.param(k, marks=pytest.mark.slow) for k in ("padded", "packed"))]
)
def test_all_of_it(stage: int, kind: str) -> None:
    runs = check("llama", stage, "LlamaAttention", TILES, kind=kind)
    # two tiles in forward, in its recomputation, and in the tiles' own backward
    assert runs["SiLUActivation"] == 3 * 2 * LAYERS * STEPS


@pytest.mark.parametrize("stage", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_blocks_that_are_given_a_cache_that_gathers(stage: int) -> None:
    """Bloom; a cache that kept something would make its blocks run once."""
    from ds_sequence_parallel.hf import GatheredKeys

    assert GatheredKeys.recompute_safe
    check("bloom", stage, "BloomAttention", {})


def sparse(pattern: dict[str, Any], sections: dict[str, Any], options: dict[str, Any]) -> Any:
    """Losses, weights and logits of a Llama whose attention is sparse."""
    return m.trained(
        "llama", {"sparse_attention": {"block": 4, **pattern}, **sections}, steps=STEPS, **options
    )


@pytest.mark.parametrize(
    ("kind", "stage"), [("padded", 3), pytest.param("packed", 0, marks=pytest.mark.slow)]
)
def test_sparse_attention_of_divided_sequences(kind: str, stage: int) -> None:
    options = {"eps": EPS, "kind": kind}
    if kind == "packed":  # one process would not look for documents, since it is given a cache
        pattern: dict[str, Any] = {"mode": "dense"}
        losses, weights, logits = m.alone("llama", steps=STEPS, **options)
    else:
        pattern = {"num_local_blocks": 2}
        ((losses, weights, logits),) = run_ranks(1, sparse, pattern, {}, options)
    divided = {"sequence_parallel": {"size": 2}, "zero_optimization": {"stage": stage}}
    for found in run_ranks(2, sparse, pattern, divided, options):
        assert difference(found[0], losses) < 1e-6
        assert difference(found[1], weights) < 1e-6
        assert float((logits - found[2]).abs().max()) < 1e-5
