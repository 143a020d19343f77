"""What is refused, and what the error says; inputs and losses that are easily wrong."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import pytest
import sp_models as m
import sp_plain
import torch
from ds_testing import run_ranks
from torch import nn


def engine_of(model: nn.Module, **section: Any) -> Any:
    import ds_core

    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }
    return ds_core.initialize(
        model=model, config={**config, "sequence_parallel": {"size": 2, **section}}
    )[0]


def said(function: Any, *args: Any, **kwargs: Any) -> str:
    from ds_core.errors import DSError

    try:
        function(*args, **kwargs)
    except DSError as error:
        return str(error)
    return "nothing"


def refusals() -> dict[str, str]:
    found = {}
    engine = engine_of(m.make_model("llama"))
    tokens = m.batch(0, 12)
    found["too short"] = said(engine, input_ids=tokens["input_ids"][:, :1])
    found["a mask of one's own"] = said(engine, **tokens, attention_mask=torch.ones(2, 1, 12, 12))
    found["an unknown argument"] = said(engine, **tokens, weights=torch.ones(2, 12))
    engine.destroy()
    engine = engine_of(m.make_model("bloom"))
    found["packed bloom"] = said(engine, **m.batch(0, 12, "packed"))
    engine.destroy()
    found["ring bloom"] = said(engine_of, m.make_model("bloom"), mode="ring")
    model = m.make_model("gpt2")
    for block in model.transformer.h:
        block.attn.attn_dropout.p = 0.1
    engine = engine_of(model, mode="ring")
    found["dropout"] = said(engine, **tokens)
    engine.destroy()
    found["inputs"] = said(engine_of, sp_plain.divided(), inputs={"token": 1})
    engine = engine_of(sp_plain.divided(), inputs={"tokens": 1, "positions": 1, "labels": 1})
    found["odd"] = said(engine, *(x[:, :7] for x in sp_plain.batch(0, 0, 0).values()))
    engine.destroy()
    found["ulysses in a ring"] = said(
        engine_of, sp_plain.divided(), mode="ring", inputs={"tokens": 1}
    )
    return found


REASONS = {
    "too short": "1 tokens cannot be divided over 2 ranks",
    "a mask of one's own": "must be [batch, sequence] with the 12 tokens of the whole sequence",
    "an unknown argument": '"inputs": {"weights": 1}',
    "packed bloom": "BloomForCausalLM does not use",
    "ring bloom": "mode is ring, and BloomForCausalLM",
    "dropout": "ring attention has no dropout",
    "inputs": "names token, and Divided.forward takes tokens, positions, labels",
    "odd": "tokens has 7 positions",
    "ulysses in a ring": "DistributedAttention needs sequence_parallel.mode ulysses",
}


def test_what_is_refused() -> None:
    pytest.importorskip("transformers")
    for found in run_ranks(2, refusals):
        assert {name: REASONS[name] in text for name, text in found.items()} == dict.fromkeys(
            REASONS, True
        ), found


class OwnLoss(nn.Module):
    """A model that hands labels on to a transformers model, and takes its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = m.make_model("gpt2")

    def forward(self, input_ids: Any, labels: Any) -> Any:
        return self.inner(input_ids, labels=labels, num_items_in_batch=10).loss


def wrapped_and_given_back() -> dict[str, float]:
    """A transformers model inside another module, with a count of the user's; then used without the
    engine.
    """
    batch = m.batch(0, 12)
    alone = OwnLoss()
    wanted = alone(**batch)
    model = OwnLoss()
    engine = engine_of(model)
    shown = engine(**batch)
    with torch.no_grad():
        generated = model.inner.generate(
            batch["input_ids"], max_new_tokens=3, do_sample=False, pad_token_id=0
        )
    engine.destroy()
    after = model(**batch)
    usual = alone.inner.generate(
        batch["input_ids"], max_new_tokens=3, do_sample=False, pad_token_id=0
    )
    return {
        "loss": abs(float(shown.detach() - wanted.detach())),
        "afterwards": abs(float((after - wanted).detach())),
        "generated": float((generated - usual).abs().max()),
    }


def test_a_model_inside_another_one() -> None:
    pytest.importorskip("transformers")
    for found in run_ranks(2, wrapped_and_given_back):
        assert all(off < 1e-6 for off in found.values()), found
