"""Checkpoints of models with AutoEP: experts are stored whole, so any expert-parallel size, or
none, reads them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from autoep_models import OWN_PATTERNS, Own, alone, hugging_face, ids, settings, texts
from ds_testing import run_ranks
from ds_testing.truth import difference, train

HALF = 3
ALL = 6


def model_of(kind: str) -> Any:
    return Own(listed=True) if kind == "own" else hugging_face(kind)


def keys(kind: str) -> dict[str, Any]:
    return OWN_PATTERNS if kind == "own" else {}


def first_half(kind: str, stage: int, folder: str) -> list[float]:
    """Train on 4 ranks with ep 4 and save in every way there is."""
    import ds_core

    engine, *_ = ds_core.initialize(model=model_of(kind), config=settings(4, stage, **keys(kind)))
    losses = train(engine, texts, HALF)
    engine.save_checkpoint(folder)
    engine.save_16bit_model(folder + "/16bit")
    engine.destroy()
    return losses


def second_half(
    kind: str, world: int, runs: list[tuple[int, int]], folder: str
) -> dict[str, dict[str, float]]:
    """Resume with each (ep, stage) and train on; ep 0: the unmodified model without AutoEP."""
    import ds_core

    truth = model_of(kind)
    wanted = alone(truth, 4, ALL)
    found = {}
    for ep, stage in runs:
        config = settings(ep, stage, **keys(kind)) | {"gradient_accumulation_steps": 4 // world}
        engine, *_ = ds_core.initialize(model=model_of(kind), config=config)
        engine.load_checkpoint(folder)
        assert engine.global_steps == HALF
        losses = train(engine, texts, range(HALF, ALL))
        engine.destroy()
        found[f"ep {ep}, stage {stage}"] = {
            "losses": difference(losses, wanted[HALF:]),
            "weights": difference(engine.module, truth),
        }
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "stage"),
    [
        pytest.param("mixtral", 0, marks=pytest.mark.slow),
        pytest.param("deepseek_v3", 3, marks=pytest.mark.slow),
        ("own", 1),
    ],
)
def test_resumes_with_another_expert_parallel_size(kind: str, stage: int, tmp_path: Path) -> None:
    folder = str(tmp_path)
    truth = model_of(kind)
    wanted = alone(truth, 4, HALF)
    assert run_ranks(4, first_half, kind, stage, folder)[0] == pytest.approx(wanted, abs=1e-6)
    runs = {1: [(1, 0), (0, 0)], 2: [(2, 3), (1, 2), (0, 1)], 4: [(4, 1), (2, 0)]}
    for world, cases in runs.items():
        for rank, found in enumerate(run_ranks(world, second_half, kind, world, cases, folder)):
            for case, off in found.items():
                assert off["losses"] < 1e-6 and off["weights"] < 1e-9, (
                    f"rank {rank} of {world}, {case}: {off}"
                )
    check_files(tmp_path, truth)
    if kind != "own":
        check_hugging_face(tmp_path, truth)


def check_files(folder: Path, truth: Any) -> None:
    """Every state of an expert is there once, under its own name and in its whole shape."""
    manifest = json.loads((folder / f"global_step{HALF}" / "manifest.json").read_text())
    states = {s["name"]: s for s in manifest["states"]}
    assert len(states) == len(manifest["states"])
    for name, param in truth.named_parameters():
        for kind in ("module", "optimizer/exp_avg", "optimizer/exp_avg_sq"):
            assert states[f"{kind}/{name}"]["shape"] == list(param.shape), name
        assert states[f"module/{name}"]["at"] == {} or ".pool." in name


def check_hugging_face(folder: Path, truth: Any) -> None:
    """The library itself reads what was saved and what is exported, into the model that it always
    was.
    """
    import transformers as hf
    from ds_checkpoint import export_weights, open_saved

    with open_saved(folder) as saved:
        export_weights(saved, folder / "fp32")
    for name, within in (("fp32", 1e-6), ("16bit", 2e-2)):
        truth.config.save_pretrained(folder / name)
        model, info = hf.AutoModelForCausalLM.from_pretrained(
            folder / name, dtype=torch.float64, attn_implementation="sdpa", output_loading_info=True
        )
        assert not any(
            info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")
        ), info
        model.config._experts_implementation = "eager"
        for (one, mine), (two, theirs) in zip(
            model.named_parameters(), truth.named_parameters(), strict=True
        ):
            assert one == two
            off = float((mine - theirs).detach().abs().max())
            size = float(theirs.detach().abs().max())
            assert off < within * max(1.0, size), one
        with torch.no_grad():
            mine, theirs = (m.eval()(input_ids=ids(0, 0)).logits for m in (model, truth))
        assert float((mine - theirs).abs().max()) < within * 10
