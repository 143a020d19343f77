"""After `destroy` a model that AutoEP divided is what it was, on every rank, with all its
experts."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from autoep_models import OWN_PATTERNS, Own, alone, hugging_face, ids, settings, texts
from ds_testing import run_ranks
from ds_testing.kits.parallel.given_back import Structure
from ds_testing.truth import difference, train

KINDS: dict[str, dict[str, Any]] = {
    "stacked": dict(OWN_PATTERNS),
    "listed": dict(OWN_PATTERNS),
    "listed, one by one": OWN_PATTERNS | {"use_grouped_mm": False},
    "mixtral": {},
}


def model_of(kind: str) -> Any:
    return hugging_face(kind) if kind == "mixtral" else Own(kind.startswith("listed"))


def loss_of(model: Any, number: int) -> float:
    with torch.no_grad():
        return float(model(input_ids=ids(number, 0), labels=ids(number, 0)).loss)


def give_back(kind: str, world: int, stage: int) -> dict[str, float]:
    """One step with AutoEP, one without, one with; after each the model is that of plain torch."""
    import ds_core

    model = model_of(kind)
    truth = model_of(kind)
    before = Structure(model)
    found = {}
    for turn, ep in enumerate((world, 0, world)):
        engine, *_ = ds_core.initialize(
            model=model, config=settings(ep, stage, **(KINDS[kind] if ep else {}))
        )
        got = train(engine, texts, range(turn, turn + 1))[0]
        engine.destroy()
        assert not (left := before.differences(model)), left[:5]
        found[f"loss {turn}"] = abs(got - alone(truth, world, [turn])[0])
        found[f"weights {turn}"] = difference(model, truth)
        for which, part in (("model", model), ("copy", copy.deepcopy(model))):
            found[f"{which} {turn}"] = abs(loss_of(part, 9) - loss_of(truth, 9))
    return found


@pytest.mark.fast_cases("stacked-2-3")
@pytest.mark.parametrize(
    ("kind", "world", "stage"),
    [
        ("stacked", 2, 3),
        ("listed", 2, 1),
        *(
            pytest.param(kind, world, stage, marks=pytest.mark.slow)
            for kind in KINDS
            for world, stage in ((1, 0), (2, 0), (4, 2), (4, 3))
        ),
    ],
)
def test_the_model_is_what_it_was(kind: str, world: int, stage: int) -> None:
    for rank, found in enumerate(run_ranks(world, give_back, kind, world, stage)):
        # The library adds up in fp32, whatever the model's dtype.
        within = 1e-6 if kind == "mixtral" else 1e-11
        assert max(found.values()) < within, f"rank {rank}: {found}"


def all_alike(listed: bool, dtype: str) -> float:
    """Weights after destroy against the first rank's, where each rank began with its own."""
    import ds_core
    from ds_core import comm

    model = Own(listed).float()
    for param in model.parameters():
        param.data += comm.rank()
    config = settings(2, 2, **OWN_PATTERNS) | (
        {"bf16": {"enabled": True}} if dtype == "bf16" else {}
    )
    engine, *_ = ds_core.initialize(model=model, config=config)
    train(engine, texts, 2)
    engine.destroy()
    worst = 0.0
    for param in model.parameters():
        first = param.detach().clone()
        comm.broadcast(first, src=0)
        worst = max(worst, float((first - param).abs().max()))
    return worst


@pytest.mark.slow
@pytest.mark.fast_cases("True")
@pytest.mark.parametrize("listed", [False, True])
def test_ranks_end_alike(listed: bool) -> None:
    for dtype in ("fp32", "bf16"):
        assert max(run_ranks(4, all_alike, listed, dtype)) == 0.0
