"""Attention of some queries to one block of keys, and the combination of blocks.

Softmax over several blocks: each gives its result and the logarithm of the sum of its exponentials
(``lse``), and results are added with weights that follow from these, in fp32 (fp64 for fp64). The
gradients of a block need the output and the ``lse`` of all blocks together, and nothing else of the
other blocks: the online softmax of FlashAttention (Dao et al. 2022, section 3.1 and algorithm 4).

Dimensions: ``batch``, ``heads`` of queries, ``kv_heads`` of keys and values, ``queries`` and
``keys`` of this block, ``size`` of a head, ``value_size``; a mask has ``rows`` (batch or 1).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

ROWS = 1024
"""Query rows whose scores are in memory at once where no fused kernel applies."""


def attend(
    query: Float[Tensor, "batch heads queries size"],
    key: Float[Tensor, "batch kv_heads keys size"],
    value: Float[Tensor, "batch kv_heads keys value_size"],
    *,
    causal: bool,
    scale: float,
    mask: Bool[Tensor, "rows 1 queries keys"] | None = None,
) -> tuple[Float[Tensor, "batch heads queries value_size"], Float[Tensor, "batch heads queries"]]:
    """The attention of queries to a block of keys, and its lse.

    causal: queries and keys are the same positions, and later keys are not seen.
    mask: true where a query may look.

    Rows that see nothing are zero, with an lse of minus infinity.
    """
    key = _all_heads(key, query)
    value = _all_heads(value, query)
    if mask is None and (flash := _flash(query, value)) is not None:
        found = flash(query, key, value, 0.0, causal, scale=scale)
        return found[0], found[1]
    # Without a fused kernel: scores of some rows at a time, as the full matrix may not fit.
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
    grad: Float[Tensor, "batch heads queries value_size"],
    query: Float[Tensor, "batch heads queries size"],
    key: Float[Tensor, "batch kv_heads keys size"],
    value: Float[Tensor, "batch kv_heads keys value_size"],
    out: Float[Tensor, "batch heads queries value_size"],
    lse: Float[Tensor, "batch heads queries"],
    *,
    causal: bool,
    scale: float,
    mask: Bool[Tensor, "rows 1 queries keys"] | None = None,
) -> tuple[
    Float[Tensor, "batch heads queries size"],
    Float[Tensor, "batch kv_heads keys size"],
    Float[Tensor, "batch kv_heads keys value_size"],
]:
    """The gradients of query, key and value through one block.

    out, lse: of all blocks together.
    """
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
        # With the lse of all blocks these are the probabilities of the full softmax, P = exp(S -
        # lse).
        weights = _exp(scores, lse[:, :, rows])
        dv += weights.transpose(-1, -2) @ g
        # dS = P * (dP - rowsum(dO * O)), with dP = dO V^T; the row sum is of the full output.
        inner = (g * _wide(out[:, :, rows])).sum(-1, keepdim=True)
        ds = weights * (g @ wide_value.transpose(-1, -2) - inner) * scale
        dk += ds.transpose(-1, -2) @ q
        dqs.append(ds @ wide_key)
    return torch.cat(dqs, 2), _own_heads(dk, shared), _own_heads(dv, shared)


def add(
    out: Float[Tensor, "batch heads queries value_size"],
    lse: Float[Tensor, "batch heads queries"],
    more: Float[Tensor, "batch heads queries value_size"],
    more_lse: Float[Tensor, "batch heads queries"],
) -> None:
    """Add another block to `out` and `lse`, in place.

    Both are fp32 or fp64, and begin as zeros and minus infinities.
    """
    both = torch.logaddexp(lse, more_lse)
    # Each block counts with its share of the sum of exponentials.
    share = _exp(lse, both, False)
    more_share = _exp(more_lse, both, False)
    out.mul_(share.unsqueeze(-1)).add_(_wide(more) * more_share.unsqueeze(-1))
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
        # Rows begin at `first`: causal attention compares positions, not places in this slice.
        row = torch.arange(first, first + query.shape[2], device=key.device).unsqueeze(-1)
        scores.masked_fill_(torch.arange(key.shape[2], device=key.device) > row, float("-inf"))
    return scores if mask is None else scores.masked_fill_(~mask, float("-inf"))


def _exp(scores: Tensor, lse: Tensor, rows: bool = True) -> Tensor:
    """exp(scores - lse); zero where a row sees nothing.

    rows: scores have one dimension more.
    """
    # A row that sees nothing has -inf - -inf = NaN; with 0 instead its exponentials are 0.
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
