"""Models of transformers, sparse by config alone, against their own attention under the mask of the
pattern.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from ds_sparse_attention import SparseAttentionConfig, SparseSelfAttention, make_layout
from ds_testing.truth import tiny
from torch import Tensor, nn

import ds_core
from ds_core.errors import UsageError

hf = pytest.importorskip("transformers")

SMALL = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
BIGBIRD = {"mode": "bigbird", "block": 4, "num_random_blocks": 1, "different_layout_per_head": True}
FIXED = {"mode": "fixed", "block": 4, "num_local_blocks": 2, "attention": "unidirectional"}
LENGTH = 27
KEYS: dict[str, dict[str, Any]] = {
    "llama": SMALL | {"num_key_value_heads": 2},
    "bert": SMALL | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "gpt2": {
        "vocab_size": 32,
        "hidden_size": 16,
        "num_attention_heads": 4,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    },
}


def model_of(kind: str, attention: str = "sdpa") -> Any:
    auto = "AutoModelForMaskedLM" if kind == "bert" else "AutoModelForCausalLM"
    return tiny(kind, auto=auto, use_cache=True, attn_implementation=attention, **KEYS[kind])


def batch(rows: int = 3) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    counts = torch.ones(rows, LENGTH, dtype=torch.long)
    counts[1, 20:] = 0
    return torch.randint(0, 32, (rows, LENGTH)), counts


def mask_of(section: dict[str, Any], causal: bool, counts: Tensor) -> Tensor:
    """What eager attention adds to scores: [batch, heads, tokens, tokens]."""
    layout = make_layout(SparseAttentionConfig.model_validate(section), 4, -(-LENGTH // 4))
    seen = layout.repeat_interleave(4, 1).repeat_interleave(4, 2)[:, :LENGTH, :LENGTH]
    if causal:
        seen = seen & torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    seen = (seen & counts.bool()[:, None, None]).expand(len(counts), 4, LENGTH, LENGTH)
    return torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)


def trained(model: Any, mask: Tensor | None, more: dict[str, Any], steps: int = 3) -> list[Tensor]:
    """Logits where tokens count, and the losses and weights of some steps."""
    ids, counts = batch()
    labels = ids.masked_fill(counts == 0, -100)
    given = counts if mask is None else mask
    config = {
        "train_micro_batch_size_per_gpu": 3,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        **more,
    }
    engine, *_ = ds_core.initialize(model=model, config=config)
    found = []
    for _ in range(steps):
        out = engine(input_ids=ids, attention_mask=given, labels=labels)
        engine.backward(out.loss)
        engine.step()
        found += [out.logits[counts.bool()].detach(), out.loss.detach()]
    engine.destroy()
    return [*found, *(p.detach().clone() for p in model.parameters())]


@pytest.mark.parametrize("section", [BIGBIRD, FIXED], ids=["bigbird", "fixed"])
@pytest.mark.parametrize("kind", ["llama", "bert", "gpt2"])
def test_equals_its_own_attention_under_the_mask(kind: str, section: dict[str, Any]) -> None:
    causal = kind != "bert" or "attention" in section
    plain = trained(model_of(kind, "eager"), mask_of(section, causal, batch()[1]), {})
    model = model_of(kind)
    before = model.config._attn_implementation
    ours = trained(model, None, {"sparse_attention": section})
    assert model.config._attn_implementation == before  # given back
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-5)


@pytest.mark.parametrize("more", ["compile", "activation_checkpointing"])
def test_with_compile_and_recomputation(more: str) -> None:
    if importlib.util.find_spec(f"ds_{more}") is None:
        pytest.skip(f"ds-{more.replace('_', '-')} is not installed")
    section = {"compile": {}} if more == "compile" else {more: {"modules": "auto"}}
    plain = trained(model_of("llama"), None, {"sparse_attention": FIXED}, 1)
    ours = trained(model_of("llama"), None, {"sparse_attention": FIXED, **section}, 1)
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-5)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_generation_with_a_cache_is_that_without(kind: str) -> None:
    model = model_of(kind)
    config = {"train_batch_size": 1, "sparse_attention": FIXED}
    engine, *_ = ds_core.initialize(model=model, config=config)
    ids, counts = batch(2)
    options = {"max_new_tokens": 13, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    left = counts.flip(1)  # padded on the left
    cached = model.generate(ids[:, :11], attention_mask=left[:, :11], **options)
    assert torch.equal(
        cached, model.generate(ids[:, :11], attention_mask=left[:, :11], use_cache=False, **options)
    )
    static = model.generate(
        ids[:, :11], attention_mask=left[:, :11], cache_implementation="static", **options
    )
    assert torch.equal(cached, static)
    engine.destroy()


class Own(nn.Module):
    """A model of one's own."""

    def __init__(self, config: Any = None) -> None:
        super().__init__()
        self.inputs = nn.Linear(8, 24)
        self.outputs = nn.Linear(8, 8)
        self.attention = SparseSelfAttention(config)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.inputs(x).unflatten(-1, (6, 4)).transpose(1, 2).chunk(3, 1)
        loss: Tensor = (
            self.outputs(self.attention(q, k, v).transpose(1, 2).flatten(2)).square().mean()
        )
        return loss


def own(stage: int, gas: int, dtype: str, rank: int, ranks: int) -> list[Tensor]:
    """Losses and weights of three steps on this rank's part of 4 samples each."""
    torch.manual_seed(0)
    model = Own()
    config: dict[str, Any] = {
        "train_batch_size": 4,
        "gradient_accumulation_steps": gas,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "sparse_attention": {"mode": "bigbird", "block": 4, "num_random_blocks": 1},
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": dtype == "bf16"},
    }
    engine, *_ = ds_core.initialize(model=model, config=config)
    assert model.attention.attention is not None
    x = torch.randn(3, 4, 30, 8, generator=torch.Generator().manual_seed(2))
    losses = []
    for step in x:
        mine = step.chunk(gas * ranks)[rank::ranks]
        for part in mine:
            loss = engine(part.to(next(engine.module.parameters()).dtype))
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach().float())
    state = engine.module_state_dict() if hasattr(engine, "module_state_dict") else None
    weights = [v.float() for v in (state or model.state_dict()).values()]
    engine.destroy()
    assert model.attention.attention is None
    return [torch.stack(losses).mean(), *weights]


def _own(stage: int, gas: int, dtype: str) -> list[Tensor]:
    import torch.distributed as dist

    return own(stage, gas, dtype, dist.get_rank(), dist.get_world_size())


@pytest.mark.parametrize(
    ("size", "stage", "gas", "dtype"),
    [(2, 3, 2, "fp32"), (4, 2, 1, "fp32"), (4, 3, 1, "bf16"), (2, 1, 1, "bf16")],
)
def test_several_ranks_train_what_one_does(
    ranks: Any, size: int, stage: int, gas: int, dtype: str
) -> None:
    pytest.importorskip("ds_zero")
    alone = own(0, gas, dtype, 0, 1)
    each = ranks(size, _own, stage, gas, dtype)
    loss = torch.stack([found[0] for found in each]).mean()
    torch.testing.assert_close(loss, alone[0], rtol=0, atol=1e-6 if dtype == "fp32" else 1e-3)
    for found in each:
        for a, b in zip(found[1:], alone[1:], strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-5 if dtype == "fp32" else 0.02)


@pytest.mark.parametrize(
    ("model", "section", "said"),
    [
        (lambda: nn.Linear(2, 2), FIXED, "SparseSelfAttention"),
        (
            lambda: hf.T5ForConditionalGeneration(
                hf.T5Config(d_model=8, d_kv=2, d_ff=8, num_layers=1, num_heads=2)
            ),
            FIXED,
            "sparse_attention: T5",
        ),
    ],
)
def test_a_model_that_cannot_be_sparse_is_an_error(
    model: Any, section: dict[str, Any], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        ds_core.initialize(
            model=model(), config={"train_batch_size": 1, "sparse_attention": section}
        )


def test_masks_that_cannot_be_read_are_an_error() -> None:
    engine, *_ = ds_core.initialize(
        model=model_of("gpt2"), config={"train_batch_size": 3, "sparse_attention": FIXED}
    )
    ids, counts = batch()
    with pytest.raises(UsageError, match="attention_mask must be"):
        engine(input_ids=ids, attention_mask=mask_of(FIXED, True, counts))
    dense = mask_of(FIXED, True, counts)[:, :1] == 0
    own, plain = (engine(input_ids=ids, attention_mask=m).logits for m in (dense, counts))
    torch.testing.assert_close(own[counts.bool()], plain[counts.bool()])
    engine.destroy()
