"""A mixture of experts written plainly: dense [tokens, experts, capacity] masks, einsum, a loop
over experts.

Slow and large on purpose. What tests compare with.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn


def masks_top1(
    logits: Tensor, capacity: int | None, gumbel: Any = None, used: Any = None, priority: Any = None
) -> Any:
    """(combine [s, E, C], l_aux, counts [E])."""
    s, num = logits.shape
    gates = logits.softmax(1)
    mask = nn.functional.one_hot((gates if gumbel is None else logits + gumbel).argmax(1), num).to(
        gates.dtype
    )
    if used is not None:
        mask = mask * used[:, None]
    counts = mask.sum(0)
    l_aux = num * (gates.mean(0) * mask.mean(0)).sum()
    room = s if capacity is None else capacity
    order = (
        torch.ones(s, num, dtype=gates.dtype)
        if priority is None
        else priority[:, None].to(gates.dtype) + 1e-9
    )
    kept = torch.zeros_like(mask)
    for e in range(num):
        waiting = sorted(
            (i for i in range(s) if mask[i, e]), key=lambda i: (-float(order[i].max()), i)
        )
        for i in waiting[:room]:
            kept[i, e] = 1
    place = (kept.cumsum(0) - 1) * kept
    slots = nn.functional.one_hot(place.sum(1).long(), max(room, 1)).to(gates.dtype)
    return torch.einsum("se,sc->sec", gates * kept, slots), l_aux, counts


def masks_top2(logits: Tensor, capacity: int | None, gumbel: Any = None) -> Any:
    """The same for top-2."""
    s, num = logits.shape
    gates = logits.softmax(1)
    first = nn.functional.one_hot(gates.argmax(1), num)
    noisy = logits if gumbel is None else logits + gumbel
    second = nn.functional.one_hot(noisy.masked_fill(first.bool(), -torch.inf).argmax(1), num)
    place1 = first.cumsum(0) - 1
    place2 = second.cumsum(0) - 1 + first.sum(0)
    counts = (first + second).sum(0)
    l_aux = num * num * (gates.mean(0) * first.to(gates.dtype).mean(0)).mean()
    room = 2 * s if capacity is None else capacity
    first = first * (place1 < room)
    second = second * (place2 < room)
    g1 = (gates * first).sum(1)
    g2 = (gates * second).sum(1)
    total = (g1 + g2).clamp(min=torch.finfo(gates.dtype).eps)
    out = torch.zeros(s, num, room, dtype=gates.dtype)
    for g, mask, place in ((g1 / total, first, place1), (g2 / total, second, place2)):
        slots = nn.functional.one_hot((place * mask).sum(1), room).to(gates.dtype)
        out = out + torch.einsum("s,se,sc->sec", g, mask.to(gates.dtype), slots)
    return out, l_aux, counts


def masks_topk(logits: Tensor, k: int, capacity: int | None, policy: str = "probs") -> Any:
    """The same for top-k."""
    s, num = logits.shape
    gates = logits.softmax(1)
    mask = torch.zeros_like(gates).scatter(1, gates.topk(k, 1).indices, 1.0)
    counts = mask.sum(0)
    l_aux = num * num / k * (gates.mean(0) * mask.mean(0)).mean()
    room = k * s if capacity is None else capacity
    if capacity is not None and policy == "probs":
        best = (gates * mask).topk(min(capacity, s), 0).indices
        mask = mask * torch.zeros_like(mask).scatter(0, best, 1.0)
    else:
        mask = mask * ((mask.cumsum(0) - 1) < room)
    place = ((mask.cumsum(0) - 1) * mask).long()
    shares = (
        gates * mask / (gates * mask).sum(1, keepdim=True).clamp(min=torch.finfo(gates.dtype).eps)
    )
    slots = nn.functional.one_hot(place, room).to(gates.dtype) * mask[..., None]
    return shares[..., None] * slots, l_aux, counts


class ReferenceMoE(nn.Module):
    """The layer on one process, for one rank's tokens at a time.

    Randomness is switched off or given.
    """

    def __init__(
        self,
        hidden: int,
        expert: nn.Module,
        num: int,
        k: int,
        *,
        residual: bool = False,
        **gate: Any,
    ) -> None:
        super().__init__()
        self.wg = nn.Linear(hidden, num, bias=False)
        self.experts = nn.ModuleList(copy.deepcopy(expert) for _ in range(num))
        self.k = k
        self.gate = gate
        if residual:
            self.mlp = copy.deepcopy(expert)
            self.coefficient = nn.Linear(hidden, 2)

    def capacity(self, tokens: int) -> int | None:
        """As documented."""
        if not self.gate.get("drop_tokens", True):
            return None
        factor = self.gate.get("capacity_factor" if self.training else "eval_capacity_factor", 1.0)
        return max(
            math.ceil(tokens / len(self.experts) * self.k * factor),
            self.gate.get("min_capacity", 4),
        )

    def forward(self, x: Tensor, used: Any = None) -> Any:
        """x: [s, hidden]."""
        logits = self.wg(x)
        room = self.capacity(len(x))
        if self.k == 1:
            combine, l_aux, counts = masks_top1(logits, room, used=used)
        elif self.k == 2:
            combine, l_aux, counts = masks_top2(logits, room)
        else:
            combine, l_aux, counts = masks_topk(
                logits, self.k, room, self.gate.get("drop_policy", "probs")
            )
        buffers = torch.einsum("sec,sm->ecm", (combine != 0).to(x.dtype), x)
        outs = [expert(b) for expert, b in zip(self.experts, buffers, strict=True)]
        done = torch.stack([o[0] if isinstance(o, tuple) else o for o in outs])
        out = torch.einsum("sec,ecm->sm", combine, done)
        if hasattr(self, "mlp"):
            mixing = self.coefficient(x).softmax(-1)
            out = out * mixing[:, :1] + self.mlp(x) * mixing[:, 1:]
        return out, l_aux, counts
