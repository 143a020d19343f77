"""Sparse attention against dense attention under the same mask: results and gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from ds_sparse_attention import SparseAttention, SparseAttentionConfig, SparseSelfAttention
from torch import Tensor

from ds_core.errors import UsageError

PATTERNS: dict[str, dict[str, Any]] = {
    "dense": {"mode": "dense"},
    "fixed": {"num_local_blocks": 4, "num_global_blocks": 2},
    "heads": {
        "num_local_blocks": 4,
        "num_different_global_patterns": 4,
        "different_layout_per_head": True,
    },
    "causal": {"num_local_blocks": 2, "attention": "unidirectional"},
    "variable": {"mode": "variable", "num_random_blocks": 1, "local_window_blocks": [1, 3]},
    "bigbird": {"mode": "bigbird", "num_random_blocks": 2, "different_layout_per_head": True},
    "bslongformer": {
        "mode": "bslongformer",
        "global_block_indices": [0, 3],
        "attention": "unidirectional",
    },
}


def dense(
    attention: SparseAttention, q: Tensor, k: Tensor, v: Tensor, causal: bool, counts: Tensor | None
) -> Tensor:
    """In plain torch, every score computed."""
    heads = q.shape[1]
    tokens = q.shape[2]
    share = q.shape[1] // k.shape[1]
    edge = attention.config.block
    layout = attention.layout(heads, -(-tokens // edge))
    mask = layout.repeat_interleave(edge, 1).repeat_interleave(edge, 2)[:, :tokens, :tokens][None]
    if causal or attention.config.causal:
        mask = mask & torch.ones(tokens, tokens, dtype=torch.bool).tril()
    if counts is not None:
        mask = mask & counts[:, None, None]
    scores = q @ k.repeat_interleave(share, 1).mT / math.sqrt(q.shape[-1])
    weights = scores.masked_fill(~mask, -math.inf).softmax(-1).nan_to_num(0.0)
    return weights @ v.repeat_interleave(share, 1)


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize(("tokens", "key_heads"), [(48, 4), (45, 2)])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_equals_dense_attention_under_the_mask(
    pattern: str, tokens: int, key_heads: int, padded: bool
) -> None:
    torch.manual_seed(0)
    attention = SparseAttention(
        SparseAttentionConfig.model_validate({"block": 4, **PATTERNS[pattern]})
    )
    sizes = ((4, tokens), (key_heads, tokens), (key_heads, tokens))
    inputs = [torch.randn(3, *size, 8, dtype=torch.float64, requires_grad=True) for size in sizes]
    counts = None
    if padded:
        counts = torch.ones(3, tokens, dtype=torch.bool)
        counts[0, :9] = False
        counts[1, 30:] = False

    def allowed(sample: Tensor, q: Tensor, k: Tensor) -> Tensor:
        assert counts is not None
        return counts[sample, k]

    for causal in (False, True):
        ours = attention(*inputs, causal=causal, allowed=allowed if padded else None)
        plain = dense(attention, *inputs, causal, counts)
        torch.testing.assert_close(ours, plain, rtol=0, atol=1e-12)
        weight = torch.randn_like(plain)
        for got, wanted in zip(
            torch.autograd.grad(ours, inputs, weight),
            torch.autograd.grad(plain, inputs, weight),
            strict=True,
        ):
            torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_query_after_the_other_gives_the_same(pattern: str) -> None:
    torch.manual_seed(1)
    attention = SparseAttention(
        SparseAttentionConfig.model_validate({"block": 4, **PATTERNS[pattern]})
    )
    q, k, v = (torch.randn(2, 4, 26, 8, dtype=torch.float64) for _ in range(3))
    layout = attention.layout(4, 7).repeat_interleave(4, 1).repeat_interleave(4, 2)[:, :26, :26]
    seen = layout & torch.ones(26, 26, dtype=torch.bool).tril()
    whole = (q @ k.mT / math.sqrt(8)).masked_fill(~seen, -math.inf).softmax(-1) @ v
    for end in (5, 17, 26):
        # its random blocks are those of a whole sequence of that length
        if attention.config.mode == "bigbird":
            continue
        part = attention(q[:, :, end - 3 : end], k[:, :, :end], v[:, :, :end], causal=True)
        grown = attention.layout(4, -(-end // 4))
        if torch.equal(grown, attention.layout(4, 7)[:, : grown.shape[1], : grown.shape[2]]):
            torch.testing.assert_close(part, whole[:, :, end - 3 : end], rtol=0, atol=1e-12)
    part = attention(q[:, :, 8:10], k, v, causal=True, first=8)  # a cache with room for more
    torch.testing.assert_close(part, whole[:, :, 8:10], rtol=0, atol=1e-12)


def test_bf16_is_within_its_rounding() -> None:
    torch.manual_seed(0)
    attention = SparseAttention(SparseAttentionConfig(mode="bigbird", block=8, num_random_blocks=1))
    q, k, v = (torch.randn(2, 4, 64, 16) for _ in range(3))
    plain = dense(attention, q, k, v, False, None)
    ours = attention(q.bfloat16(), k.bfloat16(), v.bfloat16())
    assert ours.dtype == torch.bfloat16
    assert (ours.float() - plain).norm() < 0.01 * plain.norm()


@pytest.mark.parametrize("pattern", PATTERNS)
def test_what_is_computed_follows_the_number_of_blocks(pattern: str) -> None:
    attention = SparseAttention(SparseAttentionConfig.model_validate(PATTERNS[pattern]))
    made = attention.pattern(4, 1024, torch.device("cpu"))
    layout = attention.layout(4, 64)
    seen = int(layout.sum())
    assert seen <= made.computed <= 2.5 * seen
    tiles = -(-64 // made.tile) * len(layout)
    assert sorted(i for group in made.groups for i in group.tiles.tolist()) == list(range(tiles))
    assert made.density == pytest.approx(float(layout.float().mean()))


def test_the_module_masks_drops_and_says_what_it_lacks() -> None:
    torch.manual_seed(0)
    q = torch.randn(2, 2, 32, 8)
    module = SparseSelfAttention({"mode": "fixed", "block": 8})
    counts = torch.ones(2, 32, dtype=torch.bool)
    counts[1, 20:] = False
    assert module.attention is not None
    torch.testing.assert_close(
        module(q, q, q, counts), dense(module.attention, q, q, q, False, counts)
    )
    assert not torch.equal(module(q, q, q, dropout=0.5), module(q, q, q))
    assert torch.equal(module.eval()(q, q, q, dropout=0.5), module(q, q, q))
    with pytest.raises(UsageError, match="bool"):
        module(q, q, q, counts.long())
    with pytest.raises(UsageError, match="no pattern"):
        SparseSelfAttention()(q, q, q)
    with pytest.raises(UsageError, match="10 keys"):
        module(q, q[:, :, :10], q[:, :, :10])
    with pytest.raises(UsageError, match="unevenly"):
        module(torch.randn(1, 3, 8, 8), q[:1, :, :8], q[:1, :, :8])
    with pytest.raises(UsageError, match="behind the 4 blocks"):
        SparseSelfAttention({"mode": "bslongformer", "block": 8, "global_block_indices": [9]})(
            q, q, q
        )


def test_deepspeeds_classes() -> None:
    from ds_sparse_attention.deepspeed_names import BigBirdSparsityConfig, FixedSparsityConfig
    from ds_sparse_attention.deepspeed_names import SparseSelfAttention as Theirs

    torch.manual_seed(0)
    config = FixedSparsityConfig(
        num_heads=2, block=8, num_local_blocks=2, attention="unidirectional"
    )
    assert config.make_layout(32).shape == (2, 4, 4) and config.make_layout(32).dtype == torch.int64
    assert BigBirdSparsityConfig(num_heads=2).config.num_random_blocks == 1
    with pytest.raises(UsageError, match="multiple of the block of 8"):
        config.make_layout(30)
    q, k, v = (torch.randn(2, 2, 32, 4, dtype=torch.float64) for _ in range(3))
    counts = torch.ones(2, 32, dtype=torch.bool)
    counts[1, 20:] = False
    module = Theirs(config)
    wanted = dense(module.attention, q, k, v, False, counts)
    added = torch.zeros(2, 32).masked_fill(~counts, -10000.0)
    torch.testing.assert_close(module(q, k, v, key_padding_mask=added), wanted)
    square = torch.ones(32, 32).tril()
    other = Theirs(config, key_padding_mask_mode="mul")
    torch.testing.assert_close(
        other(q, k, v, key_padding_mask=counts.int(), attn_mask=square), wanted
    )
    for options, said in (
        ({"rpe": q}, "rpe"),
        ({"key_padding_mask": added + 0.5}, "very negative"),
    ):
        with pytest.raises(UsageError, match=said):
            module(q, k, v, **options)
    with pytest.raises(UsageError, match="'add' or 'mul'"):
        Theirs(config, "or")
