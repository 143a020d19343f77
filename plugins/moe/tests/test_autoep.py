"""Models with AutoEP against the same models in one process of plain torch: logits, losses, weights."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from autoep_models import FAMILIES, STEPS, hugging_face, ids, plain, settings, train, weights_off

from ds_core.testing import run_ranks


def compare(kind: str, world: int, cases: list[tuple[int, int]]) -> dict[str, dict[str, float]]:
    """For each (ep, stage), how far losses, logits and weights are from plain torch."""
    import ds_core
    from ds_core.slices import SLICES

    truth = hugging_face(kind)
    losses = plain(truth, world)
    with torch.no_grad():
        wanted = truth(input_ids=ids(99, 0), labels=ids(99, 0), output_router_logits=True)
        generated = truth.eval().generate(ids(99, 1), max_new_tokens=4, do_sample=False, use_cache=True)
    found = {}
    for ep, stage in cases:
        model = hugging_face(kind)
        engine, *_ = ds_core.initialize(
            model=model, model_parameters=list(model.parameters()), config=settings(ep, stage)
        )
        got = train(engine, range(STEPS))
        with torch.no_grad():
            out = engine(input_ids=ids(99, 0), labels=ids(99, 0), output_router_logits=True)
            tokens = engine.eval().generate(ids(99, 1), max_new_tokens=4, do_sample=False, use_cache=True)
        slices = engine.ctx.stash[SLICES]
        engine.destroy()  # stage 3: weights are whole again
        found[f"ep {ep}, stage {stage}"] = {
            "losses": max(abs(a - b) for a, b in zip(got, losses, strict=True)),
            "logits": float((out.logits - wanted.logits).abs().max()),
            "router": float(abs(out.aux_loss - wanted.aux_loss)) if kind in WITH_AUX else 0.0,
            "generated": float(not torch.equal(tokens, generated)),
            "weights": weights_off(engine.module, truth, slices),
        }
    return found


WITH_AUX = ("mixtral", "qwen3_moe", "qwen3_5_moe")
"""Families whose output has the auxiliary loss."""
CASES = {1: [(1, 0), (1, 3)], 2: [(2, 0), (2, 1), (2, 2), (2, 3), (1, 2)], 4: [(4, 0), (4, 3), (2, 1), (2, 3)]}


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("kind", FAMILIES)
def test_trains_as_plain_transformers(kind: str, world: int) -> None:
    for rank, found in enumerate(run_ranks(world, compare, kind, world, CASES[world], timeout=240.0)):
        for case, off in found.items():
            # The library adds up losses, norms and scores in fp32, whatever the model's dtype.
            within = {"losses": 1e-6, "logits": 1e-9, "weights": 1e-9, "router": 1e-9, "generated": 0}
            assert all(off[what] <= within[what] for what in within), f"rank {rank}, {case}: {off}"
