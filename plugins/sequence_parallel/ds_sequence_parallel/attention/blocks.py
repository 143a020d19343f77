"""Attention of some queries to one block of keys, with what is needed to combine blocks; forward
and backward.

Softmax over several blocks: each gives its result and the logarithm of the sum of its exponentials
(``lse``), and results are added with weights that follow from these, in fp32 (fp64 for fp64). The
gradients of a block need the output and the ``lse`` of all blocks together, and nothing else of the
other blocks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

ROWS = 1024
"""Query rows whose scores are in memory at once where no fused kernel applies."""


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool,
    scale: float,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The attention of [batch, heads, queries, size] to a block, and its lse [batch, heads,
    queries].

    causal: queries and keys are the same positions. mask: boolean [batch or 1, 1, queries, keys],
    where true counts. Rows that see nothing are zero, with an lse of minus infinity.
    """
    key = _all_heads(key, query)
    value = _all_heads(value, query)
    if mask is None and (flash := _flash(query, value)) is not None:
        found = flash(query, key, value, 0.0, causal, scale=scale)
        return found[0], found[1]
    outs = []
    lses = []
    for first in range(0, query.shape[2], ROWS):
        rows = slice(first, first + ROWS)
        scores = _scores(
            query[:, :, rows], key, first, causal, scale, None if mask is None else mask[:, :, rows]
        )
        lse = scores.logsumexp(-1)
        outs.append((_exp(scores, lse) @ _wide(value)).to(query.dtype))
        lses.append(lse)
    return torch.cat(outs, 2), torch.cat(lses, 2)


def attend_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    causal: bool,
    scale: float,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value by way of one block. out, lse: over all blocks."""
    shared = key.shape[1]
    key = _all_heads(key, query)
    value = _all_heads(value, query)
    if mask is None and _flash(query, value) is not None:
        backward: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        dq, dk, dv = backward(grad, query, key, value, out, lse, 0.0, causal, scale=scale)
        return dq, _own_heads(dk, shared), _own_heads(dv, shared)
    wide_key = _wide(key)
    wide_value = _wide(value)
    dk = torch.zeros_like(wide_key)
    dv = torch.zeros_like(wide_value)
    dqs = []
    for first in range(0, query.shape[2], ROWS):
        rows = slice(first, first + ROWS)
        q = _wide(query[:, :, rows])
        g = _wide(grad[:, :, rows])
        scores = _scores(q, key, first, causal, scale, None if mask is None else mask[:, :, rows])
        weights = _exp(scores, lse[:, :, rows])
        dv += weights.transpose(-1, -2) @ g
        inner = (g * _wide(out[:, :, rows])).sum(-1, keepdim=True)
        ds = weights * (g @ wide_value.transpose(-1, -2) - inner) * scale
        dk += ds.transpose(-1, -2) @ q
        dqs.append(ds @ wide_key)
    return torch.cat(dqs, 2), _own_heads(dk, shared), _own_heads(dv, shared)


def add(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
    """Add another block to `out` and `lse`, which are wide and begin as zeros and minus infinities;
    in place.
    """
    both = torch.logaddexp(lse, more_lse)
    here = _exp(lse, both, False)
    there = _exp(more_lse, both, False)
    out.mul_(here.unsqueeze(-1)).add_(_wide(more) * there.unsqueeze(-1))
    lse.copy_(both)


def _flash(query: Tensor, value: Tensor) -> Any:
    """torch's fused kernel that also gives the lse, where there is one."""
    if (
        query.device.type == "cpu"
        and query.shape[-1] == value.shape[-1]
        and query.shape[2]
        and value.shape[2]
    ):
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return None


def _scores(
    query: Tensor, key: Tensor, first: int, causal: bool, scale: float, mask: Tensor | None
) -> Tensor:
    scores = _wide(query) @ _wide(key).transpose(-1, -2) * scale
    if causal:
        row = torch.arange(first, first + query.shape[2], device=key.device).unsqueeze(-1)
        scores.masked_fill_(torch.arange(key.shape[2], device=key.device) > row, float("-inf"))
    return scores if mask is None else scores.masked_fill_(~mask, float("-inf"))


def _exp(scores: Tensor, lse: Tensor, rows: bool = True) -> Tensor:
    """exp(scores - lse); zero where a row sees nothing. rows: scores have one dimension more."""
    lse = lse.masked_fill(lse == float("-inf"), 0.0)
    return (scores - (lse.unsqueeze(-1) if rows else lse)).exp_()


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _all_heads(x: Tensor, query: Tensor) -> Tensor:
    """Key-value heads, one for each query head."""
    times = query.shape[1] // x.shape[1]
    return x if times == 1 else x.repeat_interleave(times, 1)


def _own_heads(grad: Tensor, heads: int) -> Tensor:
    """The gradients of key-value heads, of those of the query heads that share them."""
    return grad if grad.shape[1] == heads else grad.unflatten(1, (heads, -1)).sum(2)
