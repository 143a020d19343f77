"""Which experts a token goes to, and with what weight: top-1, top-2 and top-k gating, capacity, the
auxiliary loss.

Everything here is linear in tokens: no tensor of tokens x experts x capacity. Randomness is given,
so that the functions are pure; `TopKGate` draws it.

[Note: capacity] Each expert takes at most C = max(ceil(tokens / experts x factor), min_capacity)
choices of this rank's tokens. Which ones is decided by sorting: by expert, and within an expert by
priority.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ds_core.errors import UsageError

NOISES = (None, "None", "Jitter", "RSample")
JITTER = 0.01


@dataclass(frozen=True, slots=True)
class Routing:
    """What a gate decides about N tokens.

    experts: int64 [N, k], -1 for a choice that was dropped. weights: [N, k], at least fp32. l_aux:
    0-d, the loss that evens out the load. counts: int64 [experts], choices of each before dropping.
    """

    experts: Tensor
    weights: Tensor
    l_aux: Tensor
    counts: Tensor

    def dropped(self) -> Tensor:
        """How many choices found their expert full: 0-d int64."""
        return self.counts.sum() - (self.experts >= 0).sum()


def capacity_of(tokens: int, experts: int, factor: float, min_capacity: int) -> int:
    """The most choices that an expert takes."""
    return max(math.ceil(tokens / experts * factor), min_capacity)


def within_capacity(
    experts: Tensor, counts: Tensor, capacity: int, priority: Tensor | None = None
) -> Tensor:
    """Which choices find room: bool, as long as `experts`.

    experts: int64 [L], -1 for none. counts: int64 [experts], how often each occurs. priority: [L],
    the larger the earlier; None: in the order of places.
    """
    if experts.device.type == "cpu" and not bool((counts > capacity).any()):
        return experts >= 0
    order = torch.arange(len(experts), device=experts.device)
    if priority is not None:
        order = torch.sort(priority, descending=True, stable=True).indices
    order = order[torch.sort(experts[order], stable=True).indices]  # those of no expert come first
    sorted_experts = experts[order]
    begins = len(experts) - counts.flip(0).cumsum(0).flip(0)
    place = torch.arange(len(experts), device=experts.device) - begins[sorted_experts]
    found = torch.empty_like(experts, dtype=torch.bool)
    found[order] = (sorted_experts >= 0) & (place < capacity)
    return found


def top1(
    logits: Tensor,
    capacity: int | None,
    *,
    used: Tensor | None = None,
    gumbel: Tensor | None = None,
    priority: Tensor | None = None,
) -> Routing:
    """Each token to its best expert, with the gate's value as its weight.

    logits: [N, experts]. capacity: None drops nothing. used: [N], tokens where it is 0 go nowhere.
    gumbel: noise to add for choosing. priority: [N], who stays where an expert is full; None: who
    comes first.
    """
    gates = _softmax(logits)
    if gumbel is None:
        weights, chosen = gates.max(1, keepdim=True)
    else:
        chosen = (logits + gumbel).detach().argmax(1, keepdim=True)
        weights = gates.gather(1, chosen)
    chosen = chosen[:, 0]
    experts = chosen if used is None else chosen.masked_fill(used == 0, -1)
    counts = _count(experts, logits.shape[1])
    l_aux = _balance(gates, counts)
    if capacity is not None:
        experts = experts.masked_fill(~within_capacity(experts, counts, capacity, priority), -1)
    return Routing(experts[:, None], weights, l_aux, counts)


def top2(logits: Tensor, capacity: int | None, *, gumbel: Tensor | None = None) -> Routing:
    """Each token to its best expert and to the best other one (after adding `gumbel`), weights
    summing to 1.

    A full expert takes first choices before second ones, and earlier tokens before later ones.
    Raises UsageError for fewer than two experts.
    """
    if logits.shape[1] < 2:
        raise UsageError(f"top-2 gating needs at least 2 experts, not {logits.shape[1]}; use k=1")
    gates = _softmax(logits)
    first = gates.detach().argmax(1, keepdim=True)
    noisy = logits.detach() if gumbel is None else logits.detach() + gumbel
    second = noisy.scatter(1, first, -torch.inf).argmax(1, keepdim=True)
    experts = torch.cat([first, second], 1)
    firsts = _count(first.view(-1), logits.shape[1])
    counts = firsts + _count(second.view(-1), logits.shape[1])
    if capacity is not None:
        found = within_capacity(experts.t().reshape(-1), counts, capacity).view(2, -1).t()
        experts = experts.masked_fill(~found, -1)
    return Routing(
        experts, _renormalised(gates, first, second, experts), _balance(gates, firsts), counts
    )


def topk(logits: Tensor, k: int, capacity: int | None, *, policy: str = "probs") -> Routing:
    """Each token to its `k` best experts, weights summing to 1 over those that took it.

    policy: where an expert is full it keeps the tokens with the largest gates ("probs"), or the
    earliest ("position"). Raises UsageError for another policy, or more choices than experts.
    """
    if policy not in ("probs", "position"):
        raise UsageError(f"drop_policy {policy!r} is unknown; use 'probs' or 'position'")
    if k > logits.shape[1]:
        raise UsageError(f"top-{k} gating needs at least {k} experts, not {logits.shape[1]}")
    gates = _softmax(logits)
    values, experts = torch.topk(gates.detach(), k, dim=1)
    chosen = experts
    counts = _count(experts.reshape(-1), logits.shape[1])
    if capacity is not None:
        priority = values.reshape(-1) if policy == "probs" else None
        found = within_capacity(experts.reshape(-1), counts, capacity, priority).view_as(experts)
        experts = experts.masked_fill(~found, -1)
    return Routing(
        experts, _renormalised(gates, chosen, None, experts), _balance(gates, counts) / k, counts
    )


def _softmax(logits: Tensor) -> Tensor:
    """Over each row. On the CPU torch takes four times as long for rows of 8 as for rows of 16."""
    more = 16 - logits.shape[1]
    if more <= 0 or logits.device.type != "cpu":
        return F.softmax(logits, dim=1)
    return F.softmax(F.pad(logits, (0, more), value=-torch.inf), dim=1)[:, : logits.shape[1]]


def _renormalised(gates: Tensor, chosen: Tensor, other: Tensor | None, experts: Tensor) -> Tensor:
    """The gates of each token's choices, 0 for dropped ones, divided by their sum."""
    chosen = chosen if other is None else torch.cat([chosen, other], 1)
    values = gates.gather(1, chosen) * (experts >= 0)
    return values / values.sum(1, keepdim=True).clamp(min=torch.finfo(values.dtype).eps)


def _count(experts: Tensor, num: int) -> Tensor:
    return torch.bincount(experts + 1, minlength=num + 1)[1:]


def _balance(gates: Tensor, counts: Tensor) -> Tensor:
    """experts x the sum of (mean gate x share of choices); 0 without tokens."""
    tokens, experts = gates.shape
    if tokens == 0:
        return gates.sum()
    return torch.dot(gates.mean(0), counts.to(gates.dtype)) * (experts / tokens)


def _gumbel(like: Tensor) -> Tensor:
    return -torch.empty_like(like).exponential_().log()


class _Router(nn.Linear):
    """Logits in at least fp32, whatever the tokens and the weight are in."""

    def forward(self, x: Tensor) -> Tensor:
        """x: [N, hidden]; returns [N, experts]."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x.to(dtype), self.weight.to(dtype))


class TopKGate(nn.Module):
    """The gate of a `MoE` layer; its arguments are that layer's."""

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 4,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        top2_2nd_expert_sampling: bool = True,
        drop_policy: str = "probs",
    ) -> None:
        super().__init__()
        if noisy_gate_policy not in NOISES:
            raise UsageError(
                f"noisy_gate_policy {noisy_gate_policy!r} is unknown; use 'Jitter', 'RSample' or "
                "None"
            )
        if not 1 <= k <= num_experts:
            raise UsageError(
                f"k is {k}, and there are {num_experts} experts; use 1 to {num_experts}"
            )
        if drop_policy not in ("probs", "position"):
            raise UsageError(f"drop_policy {drop_policy!r} is unknown; use 'probs' or 'position'")
        self.wg = _Router(hidden_size, num_experts, bias=False)
        self.num_experts = num_experts
        self.k = k
        self.capacity_factor = capacity_factor
        self.eval_capacity_factor = eval_capacity_factor
        self.min_capacity = min_capacity
        self.drop_tokens = drop_tokens
        self.use_rts = use_rts
        self.noise = noisy_gate_policy if noisy_gate_policy != "None" else None
        self.sample_second = top2_2nd_expert_sampling
        self.drop_policy = drop_policy

    def forward(self, x: Tensor, used_token: Tensor | None = None) -> Routing:
        """x: [N, hidden]. used_token: [N], 0 where a token is not to be looked at (top-1 only).

        Raises UsageError for fewer tokens than min_capacity, where tokens may be dropped.
        """
        if used_token is not None and self.k != 1:
            raise UsageError(f"used_token is for top-1 gating, and this layer has k={self.k}")
        if self.noise == "Jitter" and self.training:
            x = x * torch.empty_like(x).uniform_(1.0 - JITTER, 1.0 + JITTER)
        logits = self.wg(x)
        capacity = self.capacity(len(x))
        if self.k == 1:
            gumbel = _gumbel(logits) if self.noise == "RSample" and self.training else None
            priority = (
                torch.rand(len(x), device=x.device)
                if self.use_rts and capacity is not None
                else None
            )
            used = None if used_token is None else used_token.reshape(-1)
            return top1(logits, capacity, used=used, gumbel=gumbel, priority=priority)
        if self.k == 2:
            return top2(logits, capacity, gumbel=_gumbel(logits) if self.sample_second else None)
        return topk(logits, self.k, capacity, policy=self.drop_policy)

    def capacity(self, tokens: int) -> int | None:
        """The most choices an expert takes of so many tokens; None: all.

        Raises UsageError for too few tokens.
        """
        if not self.drop_tokens:
            return None
        if self.k == 1 and tokens < self.min_capacity:
            raise UsageError(
                f"top-1 gating got {tokens} tokens, fewer than min_capacity {self.min_capacity}; "
                "give larger "
                "micro-batches, a smaller min_capacity, or drop_tokens=False"
            )
        factor = self.capacity_factor if self.training else self.eval_capacity_factor
        return capacity_of(tokens, self.num_experts, self.k * factor, self.min_capacity)
