"""Models of transformers, recomputed by config alone: the same losses and gradients, caches, and
their own switch.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ds_testing.truth import tiny
from torch import Tensor

import ds_core
from ds_core.errors import UsageError

pytest.importorskip("transformers")

SIZES = {"vocab_size": 32, "hidden_size": 16, "num_attention_heads": 4, "use_cache": True}
LLAMA = {"intermediate_size": 32, "num_key_value_heads": 2, "attention_dropout": 0.2}
KEYS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "mixtral": LLAMA | {"num_local_experts": 4, "output_router_logits": True},
    "gpt2": {"resid_pdrop": 0.3},
    "t5": {
        "auto": "AutoModelForSeq2SeqLM",
        "d_model": 16,
        "d_kv": 4,
        "d_ff": 32,
        "num_layers": 2,
        "num_heads": 4,
        "dropout_rate": 0.2,
        "pad_token_id": 0,
        "decoder_start_token_id": 0,
    },
}


def model_of(kind: str) -> Any:
    return tiny(kind, **SIZES | KEYS[kind])


def gradients(model: Any, section: dict[str, Any] | None) -> list[Tensor | None]:
    """The loss and the gradients of two micro-batches."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }
    if section is not None:
        config["activation_checkpointing"] = section
    engine, *_ = ds_core.initialize(model=model.train(), config=config)
    torch.manual_seed(1)
    ids = torch.randint(0, 32, (2, 7))
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[1, 5:] = 0
    found: list[Tensor | None] = []
    for _ in range(2):
        loss = engine(input_ids=ids, attention_mask=mask, labels=ids).loss
        engine.backward(loss)
        found.append(loss.detach())
    found += [p.grad for p in model.parameters()]
    engine.destroy()
    return found


def count(model: Any) -> list[int]:
    """Counts forwards of the model's first projection."""
    calls = [0]
    layer = next(
        m for n, m in model.named_modules() if n.endswith(("q_proj", "c_attn", "SelfAttention.q"))
    )

    def counted(*args: Any) -> None:
        calls[0] += 1

    layer.register_forward_pre_hook(counted)
    return calls


@pytest.mark.parametrize(
    "kind, section",
    [
        ("llama", {"modules": ["LlamaDecoderLayer"], "policy": "keep_matmuls"}),
        ("gpt2", {"policy": "all"}),
        ("mixtral", {"policy": "all"}),
        ("t5", {"modules": ["*.block.*"]}),
    ],
)
def test_losses_and_gradients_are_the_same(kind: str, section: dict[str, Any]) -> None:
    wanted = gradients(model_of(kind), None)
    model = model_of(kind)
    calls = count(model)
    for mine, theirs in zip(gradients(model, section), wanted, strict=True):
        assert (mine is None) == (theirs is None)
        assert mine is None or torch.equal(mine, theirs)  # type: ignore[arg-type]
    assert calls[0] == 4


def switch_on(model: Any) -> None:
    """transformers' own, which has two names."""
    enable = (
        getattr(model, "activation_checkpointing_enable", None)
        or model.gradient_checkpointing_enable
    )
    enable()


def test_transformers_own_switch() -> None:
    wanted = gradients(model_of("gpt2"), None)
    own = model_of("gpt2")
    switch_on(own)
    with pytest.raises(
        UsageError, match=r"recomputed twice.*gradient_checkpointing_enable was called\. Leave"
    ):
        gradients(own, {"policy": "all"})
    # With settings alone the model chooses what is recomputed, and the section how.
    calls = count(own)
    found = gradients(own, {"cpu_checkpointing": True})
    assert all(a is b or torch.equal(a, b) for a, b in zip(found, wanted, strict=True))  # type: ignore[arg-type]
    assert calls[0] == 4
    # When the engine is destroyed it is the model's own function again.
    assert (
        "ds_activation_checkpointing"
        not in own.transformer.h[0]._gradient_checkpointing_func.func.__module__
    )

    later = model_of("gpt2")
    config = {"train_batch_size": 1, "activation_checkpointing": {"modules": "auto"}}
    engine, *_ = ds_core.initialize(model=later, config=config)
    switch_on(later)
    with pytest.raises(UsageError, match=r"transformer\.h\.0 is recomputed twice"):
        engine(torch.zeros(1, 3, dtype=torch.long))
    engine.destroy()
