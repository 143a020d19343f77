"""Families of transformers, by their own plans and by presets: as without tensor parallelism, and
loaded without it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from ds_testing import run_ranks

sys.path.insert(0, str(Path(__file__).parent))

from ds_testing.truth import difference, plain, train
from tp_models import ADAMW, FAMILIES, hugging_face, ids, settings, texts, weights_off

STEPS = 10


def errors_after_resuming(tp: int, kind: str, preset: str | None, folder: str) -> dict[str, float]:
    """How far logits, losses and weights are from one process; saved for transformers, and resumed
    here.
    """
    import torch

    import ds_core

    off: dict[str, float] = {}
    truth: Any = hugging_face(kind)
    with torch.no_grad():
        first = truth(input_ids=ids(0, 0)).logits
    engine, *_ = ds_core.initialize(
        model=hugging_face(kind), config=settings(tp, preset_model=preset)
    )
    with torch.no_grad():
        off["first logits"] = float((engine(input_ids=ids(0, 0)).logits - first).abs().max())
    half = STEPS // 2
    losses = train(engine, texts, half)
    engine.save_checkpoint(folder)
    engine.destroy()
    torch.manual_seed(77)
    engine, *_ = ds_core.initialize(
        model=hugging_face(kind), config=settings(tp, preset_model=preset)
    )
    engine.load_checkpoint(folder)
    losses += train(engine, texts, range(half, STEPS))
    engine.save_checkpoint(folder)
    wanted = plain(truth, texts, STEPS, optimizer=ADAMW)
    off["losses"] = difference(losses, wanted)
    off["weights"] = weights_off(engine, truth)
    divided = [
        n
        for n, p in engine.module.named_parameters()
        if p.numel() < dict(truth.named_parameters())[n].numel()
    ]
    assert len(divided) >= 4, divided  # heads of keys may be too few, the rest is divided
    engine.destroy()
    return off


def loaded_by_transformers(kind: str, folder: Path) -> float:
    """The export as `from_pretrained` reads it: how far its logits are from those of the model that
    was trained.
    """
    import torch
    import transformers as hf
    from ds_checkpoint.offline import convert_zero_checkpoint_to_fp32_state_dict

    truth: Any = hugging_face(kind)
    plain(truth, texts, STEPS, optimizer=ADAMW)
    convert_zero_checkpoint_to_fp32_state_dict(folder, folder / "exported")
    truth.config.save_pretrained(folder / "exported")
    model: Any
    model, info = hf.AutoModelForCausalLM.from_pretrained(
        folder / "exported",
        output_loading_info=True,
        dtype=torch.float32,
        experts_implementation="eager",
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), (
        info
    )
    with torch.no_grad():
        wanted = truth.float()(input_ids=ids(9, 9)).logits
        return float((model(input_ids=ids(9, 9)).logits - wanted).abs().max())


CASES = [
    pytest.param(
        tp,
        kind,
        preset,
        marks=() if (tp, kind, preset) == (2, "phi3", "phi3") else pytest.mark.slow,
    )
    for kind in FAMILIES
    for preset in (None, kind)
    for tp in (2, 4)
]


@pytest.mark.slow
@pytest.mark.parametrize(("tp", "kind", "preset"), CASES)
def test_a_family_trains_as_one_process(
    tp: int, kind: str, preset: str | None, tmp_path: Path
) -> None:
    for rank, off in enumerate(
        run_ranks(tp, errors_after_resuming, tp, kind, preset, str(tmp_path))
    ):
        # Norms, rotations, routing and the loss are computed in fp32 by the models.
        assert max(off.values()) < 1e-6, f"rank {rank}: {off}"
    assert loaded_by_transformers(kind, tmp_path) < 1e-6
