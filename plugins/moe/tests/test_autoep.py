"""Models with AutoEP against the same models in one process of plain torch: logits, losses, weights."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from autoep_models import BATCH, EXPERTS, FAMILIES, hugging_face, ids

from ds_core.testing import run_ranks

STEPS, RATE = 10, 0.01
LOADED = {"plugins": {"load": ["ds_zero.plugin", "expert_parallel=ds_moe.plugin"]}}


def plain(model: Any, world: int, steps: int = STEPS) -> tuple[list[float], torch.Tensor]:
    """Losses, and logits at the end, of one process that takes all ranks' batches."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.1)
    losses = []
    for step in range(steps):
        total = 0.0
        for rank in range(world):
            batch = ids(step, rank)
            loss = model(input_ids=batch, labels=batch).loss / world
            loss.backward()
            total += loss.item()
        losses.append(total)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        return losses, model(input_ids=ids(99, 0), labels=ids(99, 0)).logits


def settings(ep: int, stage: int, **section: Any) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": RATE, "weight_decay": 0.1}},
        "expert_parallel": {"enabled": True, "autoep_size": ep, **section},
        **LOADED,
    }
    if stage:
        config["zero_optimization"] = {"stage": stage, "param_persistence_threshold": 20}
    return config


def train(engine: Any, world: int, steps: range | int = STEPS) -> list[float]:
    from ds_core import comm

    losses = []
    for step in range(steps) if isinstance(steps, int) else steps:
        batch = ids(step, comm.rank())
        loss = engine(input_ids=batch, labels=batch).loss
        engine.backward(loss)
        engine.step()
        total = loss.detach().clone()
        comm.all_reduce(total)
        losses.append(total.item() / world)
    return losses


def weights_off(model: Any, truth: Any, slices: Any) -> float:
    """The largest difference between this rank's weights, or rows of them, and those of the truth."""
    wanted = dict(truth.named_parameters())
    worst = 0.0
    for name, mine in model.named_parameters():
        theirs = wanted[name]
        if name in slices:
            theirs = theirs[slices[name].first : slices[name].first + slices[name].rows]
        assert mine.shape == theirs.shape, f"{name}: {tuple(mine.shape)} {tuple(theirs.shape)}"
        worst = max(worst, float((mine - theirs).abs().max()))
    return worst


def compare(kind: str, world: int, cases: list[tuple[int, int]]) -> dict[str, dict[str, float]]:
    """For each (ep, stage), how far losses, logits and weights are from plain torch."""
    import ds_core
    from ds_core.slices import SLICES

    truth = hugging_face(kind)
    losses, logits = plain(truth, world)
    found = {}
    for ep, stage in cases:
        model = hugging_face(kind)
        engine, *_ = ds_core.initialize(
            model=model, model_parameters=list(model.parameters()), config=settings(ep, stage)
        )
        got = train(engine, world)
        with torch.no_grad():
            seen = engine(input_ids=ids(99, 0), labels=ids(99, 0)).logits
        slices = engine.ctx.stash[SLICES]
        engine.destroy()  # stage 3: weights are whole again
        found[f"ep {ep}, stage {stage}"] = {
            "losses": max(abs(a - b) for a, b in zip(got, losses, strict=True)),
            "logits": float((seen - logits).abs().max()),
            "weights": weights_off(engine.module, truth, slices),
        }
    return found


CASES = {1: [(1, 0), (1, 3)], 2: [(2, 0), (2, 1), (2, 2), (2, 3), (1, 2)], 4: [(4, 0), (4, 3), (2, 1), (2, 3)]}


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("kind", FAMILIES)
def test_trains_as_plain_transformers(kind: str, world: int) -> None:
    for rank, found in enumerate(run_ranks(world, compare, kind, world, CASES[world], timeout=240.0)):
        for case, off in found.items():
            assert max(off.values()) < 2e-6, f"rank {rank}, {case}: {off}"
            print(rank, case, off)
    assert EXPERTS % 4 == 0
