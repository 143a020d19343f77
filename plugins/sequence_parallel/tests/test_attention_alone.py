"""Ulysses and ring attention on several ranks against attention in one process: outputs and
gradients.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ds_testing import run_ranks
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

BATCH = 2
SIZE = 8


def inputs(heads: int, key_heads: int, length: int) -> list[Tensor]:
    made = torch.Generator().manual_seed(heads * 100 + length)
    shapes = [(BATCH, h, length, SIZE) for h in (heads, key_heads, key_heads, heads)]
    return [torch.randn(shape, generator=made, dtype=torch.float64) for shape in shapes]


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None = None) -> Tensor:
    times = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(times, 1) for x in (k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=causal and mask is None, attn_mask=mask)


def window_and_documents(queries: Tensor, keys: Tensor) -> Tensor:
    """Two documents, the second from position 5 on; no query looks back further than 6; key 3 is
    padding.
    """
    q = queries.unsqueeze(-1)
    k = keys
    seen = (k <= q) & (q - k < 6) & ((q >= 5) == (k >= 5)) & (k != 3)
    return seen[None, None].expand(BATCH, 1, -1, -1)


def error_of(
    kind: str, heads: int, key_heads: int, length: int, causal: bool, masked: bool
) -> float:
    """The largest difference between this rank's part and that of one process, of the output and
    three gradients.
    """
    import torch.distributed as dist
    from ds_sequence_parallel.attention.layout import Layout
    from ds_sequence_parallel.attention.ring import ring_attention
    from ds_sequence_parallel.attention.ulysses import ulysses

    rank = dist.get_rank()
    ranks = dist.get_world_size()
    layout = Layout(length, ranks, kind == "zigzag")
    *whole, grad = inputs(heads, key_heads, length)
    for x in whole:
        x.requires_grad_()
    mask = window_and_documents(torch.arange(length), torch.arange(length)) if masked else None
    wanted = attend(*whole, causal, mask)
    wanted.backward(grad)
    parts = [layout.cut(x.detach(), rank, 2).requires_grad_() for x in whole]
    if kind == "ulysses":
        out = ulysses(
            lambda q, k, v, _: attend(q, k, v, causal, mask),
            *parts,
            None,
            heads=1,
            sequence=2,
            lengths=layout.sizes,
        )
    else:
        out = ring_attention(
            *parts, None, layout, causal=causal, mask=window_and_documents if masked else None
        )
    out.backward(layout.cut(grad, rank, 2))
    pairs = [(out, wanted), *((a.grad, b.grad) for a, b in zip(parts, whole, strict=True))]
    return max(float((a - layout.cut(b, rank, 2)).detach().abs().max()) for a, b in pairs)


CASES = [
    ("ulysses", 4, 4, 16, True, False),
    # heads that do not divide, key-value heads that several ranks need, odd length
    ("ulysses", 9, 3, 13, True, False),
    ("ulysses", 3, 1, 9, False, False),  # fewer heads than ranks
    ("zigzag", 3, 1, 16, True, False),
    ("zigzag", 2, 2, 13, True, False),
    ("zigzag", 2, 1, 5, True, False),  # some chunks are empty
    ("zigzag", 2, 2, 12, False, False),
    ("contiguous", 2, 2, 11, True, False),
    ("zigzag", 4, 2, 17, True, True),
]


def compare_all(cases: list[Any]) -> list[float]:
    return [error_of(*case) for case in cases]


@pytest.mark.parametrize("ranks", [2, 4])
def test_attention_is_that_of_one_process(ranks: int) -> None:
    for found in run_ranks(ranks, compare_all, [list(case) for case in CASES]):
        assert all(off < 1e-12 for off in found), dict(zip(map(str, CASES), found, strict=True))


def ring_in_low_precision() -> list[float]:
    import torch.distributed as dist
    from ds_sequence_parallel.attention.layout import Layout
    from ds_sequence_parallel.attention.ring import ring_attention

    rank = dist.get_rank()
    layout = Layout(32, dist.get_world_size(), True)
    found = []
    *whole, _ = inputs(4, 2, 32)
    wanted = layout.cut(attend(*whole, True), rank, 2)
    for dtype in (torch.float32, torch.bfloat16):
        parts = [layout.cut(x, rank, 2).to(dtype) for x in whole]
        out = ring_attention(*parts, None, layout)
        assert out.dtype == dtype
        found.append(float((out - wanted).abs().max()))
    return found


def test_blocks_are_added_in_fp32() -> None:
    for fp32, bf16 in run_ranks(4, ring_in_low_precision):
        assert fp32 < 2e-6
        assert bf16 < 2e-2


def uneven() -> str:
    import torch.distributed as dist
    from ds_sequence_parallel import DistributedAttention

    from ds_core.errors import UsageError

    q, k, v = (torch.zeros(1, 3 + dist.get_rank(), 4, 8) for _ in range(3))
    try:
        DistributedAttention(attend, dist.group.WORLD)(q, k, v)
    except UsageError as error:
        return str(error)
    return ""


def test_parts_of_unequal_length_are_an_error() -> None:
    assert all("equal parts" in text for text in run_ranks(2, uneven))
