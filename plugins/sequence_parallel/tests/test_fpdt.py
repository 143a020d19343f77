"""Attention chunk by chunk: plain attention on any number of ranks, and one chunk of scores in
memory at a time.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ds_sequence_parallel.attention.fpdt import (
    FPDT_FFN,
    FPDT_Attention,
    FPDT_InputConstruct,
    FPDT_LogitsLoss,
    chunked_attention,
)
from ds_testing import run_ranks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from ds_core import comm
from ds_core.errors import UsageError

LENGTH = 32
BATCH = 2
WIDTH = 12
HEADS = 8
KEY_HEADS = 4
SIZE = 6
WORDS = 11


def config(**more: Any) -> Any:
    given = {
        "kv_channels": SIZE,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KEY_HEADS,
        "hidden_size": WIDTH,
        "attention_dropout": 0.0,
    }
    return SimpleNamespace(**{**given, **more})


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def weights() -> list[nn.Parameter]:
    rows = (HEADS + 2 * KEY_HEADS) * SIZE
    shapes = [(rows, WIDTH), (rows,), (WIDTH, HEADS * SIZE), (WIDTH,), (WORDS, WIDTH)]
    return [nn.Parameter(0.3 * random(*shape, seed=i)) for i, shape in enumerate(shapes)]


def rotary() -> tuple[Tensor, Tensor]:
    angles = torch.arange(LENGTH, dtype=torch.float64)[:, None, None, None] * torch.tensor(
        [1.0, 0.1]
    ).repeat(2)
    return angles.cos(), angles.sin()


def attend_by_torch(x: Tensor, given: list[nn.Parameter], turned: bool) -> Tensor:
    """The output for the whole sequence, by torch alone."""
    parts = F.linear(x, given[0], given[1]).split(
        [HEADS * SIZE, KEY_HEADS * SIZE, KEY_HEADS * SIZE], -1
    )
    q, k, v = (part.unflatten(-1, (-1, SIZE)).permute(1, 2, 0, 3) for part in parts)
    if turned:
        cos, sin = (each[:, 0, 0] for each in rotary())

        def turn(t: Tensor) -> Tensor:
            a = t[..., :2]
            b = t[..., 2:4]
            return torch.cat([t[..., :4] * cos + torch.cat([-b, a], -1) * sin, t[..., 4:]], -1)

        q = turn(q)
        k = turn(k)
    k, v = (each.repeat_interleave(HEADS // KEY_HEADS, 1) for each in (k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return F.linear(out.permute(2, 0, 1, 3).flatten(2), given[2], given[3])


def differs(chunk: int, turned: bool, offload: bool) -> float:
    """Of the losses of all tokens, and the gradients of all weights and inputs."""
    world = comm.world_size()
    rank = comm.rank()
    group = torch.distributed.group.WORLD
    whole = random(LENGTH, BATCH, WIDTH, seed=9)
    words = torch.randint(0, WORDS, (BATCH, LENGTH), generator=torch.Generator().manual_seed(4))
    truth_weights = weights()
    truth_x = whole.clone().requires_grad_()
    logits = F.linear(attend_by_torch(truth_x, truth_weights, turned), truth_weights[4])
    truth = F.cross_entropy(logits.permute(1, 2, 0), words, reduction="none")
    truth.square().sum().backward()

    numbers = torch.arange(LENGTH).expand(BATCH, -1)
    args = SimpleNamespace(ds_sequence_parallel_fpdt_chunk_size=chunk)
    dealt = FPDT_InputConstruct(words, words, numbers, None, numbers, args, world, rank).generate()
    own = dealt[4]
    order = dealt[2]
    assert (
        own is not None
        and order is not None
        and dealt[1] is not None
        and torch.equal(words[:, own[0]], dealt[0])
    )
    given = weights()
    x = whole[own[0]].clone().requires_grad_()
    layer = FPDT_Attention(config(), *given[:4], group, return_bias=False, chunk_size=chunk)
    out, bias = layer(x, None, None, rotary() if turned else None, cpu_offloading=offload)
    assert bias is None
    losses = FPDT_LogitsLoss.apply(out, dealt[1], given[4], rank, world, group, 2)
    losses.square().sum().backward()
    far = [
        (losses.t() - truth[:, order[0]]).abs().max(),
        (x.grad - truth_x.grad[own[0]]).abs().max(),
    ]  # type: ignore[operator, index]
    for mine, theirs in zip(given, truth_weights, strict=True):
        total = mine.grad.clone()  # type: ignore[union-attr]
        comm.all_reduce(total)
        far.append((total - theirs.grad).abs().max())  # type: ignore[operator]
    return max(float(f) for f in far)


@pytest.mark.parametrize(
    ("world", "chunk", "turned", "offload"),
    [
        (1, 8, True, True),
        (1, 32, False, False),
        (2, 8, True, True),
        (2, 16, False, False),
        (4, 8, True, True),
    ],
)
def test_it_is_plain_attention(world: int, chunk: int, turned: bool, offload: bool) -> None:
    assert max(run_ranks(world, differs, chunk, turned, offload)) < 1e-10


class Largest(TorchDispatchMode):
    """The elements of the largest tensor that an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for made in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(made, Tensor):
                self.elements = max(self.elements, made.numel())
        return out


def test_memory_is_that_of_a_chunk() -> None:
    """Four times the chunks, and no larger tensor; values of another width have no fused kernel."""
    found = []
    for count in (2, 8):
        chunks = [
            [random(1, 2, 16, width, seed=i).requires_grad_() for i in range(count)]
            for width in (4, 4, 3)
        ]
        with Largest() as largest:
            sum(out.square().sum() for out in chunked_attention(*chunks)).backward()  # type: ignore[union-attr]
        q, k, v = (torch.cat(each, 2) for each in chunks)
        truth = F.scaled_dot_product_attention(q, k, v, is_causal=True).square().sum()
        flat = [chunk for each in chunks for chunk in each]
        for part, grad in zip(flat, torch.autograd.grad(truth, flat), strict=True):
            assert torch.allclose(part.grad, grad, atol=1e-12)  # type: ignore[arg-type]
        found.append(largest.elements)
    assert found == [2 * 16 * 16, 2 * 16 * 16]


@pytest.mark.parametrize("add_bias", [False, True])
def test_feed_forward_in_tiles(add_bias: bool) -> None:
    given = [
        nn.Parameter(random(*shape, seed=i)) for i, shape in enumerate([(9, 5), (9,), (5, 9), (5,)])
    ]
    x = random(8, 2, 5, seed=7).requires_grad_()
    out, bias = FPDT_FFN.apply(x, *given, add_bias, 2)
    assert (bias is None) is add_bias
    attend_by_torch = F.linear(
        F.gelu(F.linear(x, given[0], given[1]), approximate="tanh"),
        given[2],
        given[3] if add_bias else None,
    )
    wanted = [x, *given[: 4 if add_bias else 3]]
    ours = torch.autograd.grad(out.square().sum(), wanted)
    for a, b in zip(ours, torch.autograd.grad(attend_by_torch.square().sum(), wanted), strict=True):
        assert torch.allclose(a, b, atol=1e-12)
    assert torch.allclose(out, attend_by_torch, atol=1e-12)


def on_two_ranks() -> None:
    FPDT_Attention(config(num_key_value_heads=1), *weights()[:4], torch.distributed.group.WORLD)


def test_what_cannot_be_says_so() -> None:
    with pytest.raises(Exception, match="2 ranks do not divide 8 heads and 1 key-value heads"):
        run_ranks(2, on_two_ranks)
    layer = FPDT_Attention(config(attention_dropout=0.1), *weights()[:4], None, chunk_size=8)
    x = random(LENGTH, BATCH, WIDTH, seed=9)
    with pytest.raises(UsageError, match="attention_dropout"):
        layer(x)
    layer.eval()
    assert layer(x)[0].shape == x.shape
    with pytest.raises(UsageError, match="attention_mask"):
        layer(x, torch.ones(1))
    with pytest.raises(UsageError, match="chunks of 8 tokens do not divide a sequence of 30"):
        layer(x[:30])
