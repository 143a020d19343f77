"""Which experts a token goes to, and with what weight: top-1, top-2 and top-k gating.

Everything here is linear in tokens: no tensor of tokens x experts x capacity. Randomness is given,
so that the functions are pure; `TopKGate` draws it.

Dimensions: ``tokens`` of this rank's micro-batch, ``experts`` of all ranks, ``k`` choices of each
token, ``choices`` any number of choices in one row.

Sources: top-1 and the auxiliary loss are Switch Transformers' (Fedus et al. 2021, equations 2 and
4), top-2 is GShard's (Lepikhin et al. 2020, algorithm 1), both as DeepSpeed-MoE combines them
(Rajbhandari et al. 2022).

[Note: capacity] Each expert accepts at most C = max(ceil(tokens / experts x factor), min_capacity)
choices of this rank's tokens. Which ones is decided by sorting: by expert, and within an expert by
priority.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ds_core.errors import UsageError

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int, Shaped

NOISES = (None, "None", "Jitter", "RSample")
JITTER = 0.01


@dataclass(frozen=True, slots=True)
class Routing:
    """What a gate decides about this rank's tokens."""

    experts: Int[Tensor, "tokens k"]
    """int64; -1 for a choice that was dropped."""
    weights: Float[Tensor, "tokens k"]
    """What the output of each choice is multiplied by; at least fp32."""
    l_aux: Float[Tensor, ""]
    """The loss that evens out the load."""
    counts: Int[Tensor, " experts"]
    """int64; the choices of each expert before dropping."""

    def dropped(self) -> Int[Tensor, ""]:
        """How many choices found their expert full: int64."""
        return self.counts.sum() - (self.experts >= 0).sum()


def capacity_of(tokens: int, experts: int, factor: float, min_capacity: int) -> int:
    """The most choices that an expert accepts."""
    return max(math.ceil(tokens / experts * factor), min_capacity)


def within_capacity(
    experts: Int[Tensor, " choices"],
    counts: Int[Tensor, " experts"],
    capacity: int,
    priority: Float[Tensor, " choices"] | None = None,
) -> Bool[Tensor, " choices"]:
    """Which choices find room in their expert.

    experts: int64, -1 for none.
    counts: int64, how often each expert occurs.
    priority: the larger the earlier; None: in the order of places.
    """
    # Nothing is full: no sort. Only on the CPU, as a GPU would have to wait for the answer.
    if experts.device.type == "cpu" and not bool((counts > capacity).any()):
        return experts >= 0
    # Two stable sorts, the second by expert: within an expert the order of the first one stays.
    order = torch.arange(len(experts), device=experts.device)
    if priority is not None:
        order = torch.sort(priority, descending=True, stable=True).indices
    order = order[torch.sort(experts[order], stable=True).indices]
    # Where each expert's choices begin. Counted from the end, as choices of no expert (-1), which
    # `counts` leaves out, come first.
    sorted_experts = experts[order]
    begins = len(experts) - counts.flip(0).cumsum(0).flip(0)
    place = torch.arange(len(experts), device=experts.device) - begins[sorted_experts]
    # Each expert keeps the first `capacity` of its choices; the answer goes back to their places.
    found = torch.empty_like(experts, dtype=torch.bool)
    found[order] = (sorted_experts >= 0) & (place < capacity)
    return found


def top1(
    logits: Float[Tensor, "tokens experts"],
    capacity: int | None,
    *,
    used: Shaped[Tensor, " tokens"] | None = None,
    gumbel: Float[Tensor, "tokens experts"] | None = None,
    priority: Float[Tensor, " tokens"] | None = None,
) -> Routing:
    """Each token to its best expert, with the gate's value as its weight.

    capacity: None drops nothing.
    used: tokens where it is 0 go nowhere.
    gumbel: noise to add for choosing.
    priority: who stays where an expert is full; None: who comes first.
    """
    gates = _softmax(logits)
    # The weight is the gate's value also where noise chose: gradients reach the router through it.
    if gumbel is None:
        weights, chosen = gates.max(1, keepdim=True)
    else:
        chosen = (logits + gumbel).detach().argmax(1, keepdim=True)
        weights = gates.gather(1, chosen)
    chosen = chosen[:, 0]
    experts = chosen if used is None else chosen.masked_fill(used == 0, -1)
    # The balance loss counts the gate's choices, so it is computed before any are dropped.
    counts = _count(experts, logits.shape[1])
    l_aux = _balance(gates, counts)
    if capacity is not None:
        experts = experts.masked_fill(~within_capacity(experts, counts, capacity, priority), -1)
    return Routing(experts[:, None], weights, l_aux, counts)


def top2(
    logits: Float[Tensor, "tokens experts"],
    capacity: int | None,
    *,
    gumbel: Float[Tensor, "tokens experts"] | None = None,
) -> Routing:
    """Each token to its best expert and to the best other one, weights summing to 1.

    A full expert accepts first choices before second ones, and earlier tokens before later ones.

    gumbel: noise to add for the second choice.

    Raises UsageError for fewer than two experts.
    """
    if logits.shape[1] < 2:
        raise UsageError(f"top-2 gating needs at least 2 experts, not {logits.shape[1]}; use k=1")
    gates = _softmax(logits)
    first = gates.detach().argmax(1, keepdim=True)
    # The largest of logits with Gumbel noise is a sample in proportion to the gates (the Gumbel-max
    # trick).
    noisy = logits.detach() if gumbel is None else logits.detach() + gumbel
    second = noisy.scatter(1, first, -torch.inf).argmax(1, keepdim=True)
    experts = torch.cat([first, second], 1)
    firsts = _count(first.view(-1), logits.shape[1])
    counts = firsts + _count(second.view(-1), logits.shape[1])
    if capacity is not None:
        # Transposed, all first choices come before all second ones.
        found = within_capacity(experts.t().reshape(-1), counts, capacity).view(2, -1).t()
        experts = experts.masked_fill(~found, -1)
    # GShard's loss counts first choices only.
    l_aux = _balance(gates, firsts)
    return Routing(experts, _renormalize(gates, first, second, experts), l_aux, counts)


def topk(
    logits: Float[Tensor, "tokens experts"], k: int, capacity: int | None, *, policy: str = "probs"
) -> Routing:
    """Each token to its `k` best experts, weights summing to 1 over those that accepted it.

    policy: where an expert is full it keeps the tokens with the largest gates ("probs"), or the
        earliest ("position").

    Raises UsageError for another policy, or more choices than experts.
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
    # All k choices count here, so the loss is divided by k: 1 for an even load, as with top-1.
    l_aux = _balance(gates, counts) / k
    return Routing(experts, _renormalize(gates, chosen, None, experts), l_aux, counts)


def _softmax(logits: Float[Tensor, "tokens experts"]) -> Float[Tensor, "tokens experts"]:
    """Over each row. On the CPU torch needs four times as long for rows of 8 as for rows of 16."""
    more = 16 - logits.shape[1]
    if more <= 0 or logits.device.type != "cpu":
        return F.softmax(logits, dim=1)
    # Columns of -inf add exp(-inf) = 0 to the sum.
    return F.softmax(F.pad(logits, (0, more), value=-torch.inf), dim=1)[:, : logits.shape[1]]


def _renormalize(
    gates: Float[Tensor, "tokens experts"],
    chosen: Int[Tensor, "tokens k"],
    other: Int[Tensor, "tokens k"] | None,
    experts: Int[Tensor, "tokens all_k"],
) -> Float[Tensor, "tokens all_k"]:
    """The gates of each token's choices, 0 for dropped ones, divided by their sum."""
    chosen = chosen if other is None else torch.cat([chosen, other], 1)
    values = gates.gather(1, chosen) * (experts >= 0)
    # A token of which every choice was dropped has a sum of 0; its weights stay 0.
    return values / values.sum(1, keepdim=True).clamp(min=torch.finfo(values.dtype).eps)


def _count(experts: Int[Tensor, " choices"], num: int) -> Int[Tensor, " experts"]:
    # bincount accepts no negative numbers: the first bin counts -1, and is left out
    return torch.bincount(experts + 1, minlength=num + 1)[1:]


def _balance(
    gates: Float[Tensor, "tokens experts"], counts: Int[Tensor, " experts"]
) -> Float[Tensor, ""]:
    """experts x the sum of (mean gate x share of choices); 0 without tokens."""
    tokens, experts = gates.shape
    if tokens == 0:
        # The mean of nothing would be NaN; this sum is 0 and still has a graph.
        return gates.sum()
    # Only the mean gate has a gradient; the share of choices is a count.
    return torch.dot(gates.mean(0), counts.to(gates.dtype)) * (experts / tokens)


def _gumbel(like: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
    # -log of an exponential variable has the Gumbel distribution
    return -torch.empty_like(like).exponential_().log()


class _Router(nn.Linear):
    """Logits in at least fp32, whatever the dtypes of the tokens and of the weight."""

    def forward(self, x: Float[Tensor, "tokens hidden"]) -> Float[Tensor, "tokens experts"]:
        dtype = torch.promote_types(x.dtype, torch.float32)
        # Autocast would run the product in 16 bits; a choice among close logits needs more
        # (Switch Transformers, "selective precision").
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
        # DeepSpeed's name of the router's weight, which checkpoints keep.
        self.wg = _Router(hidden_size, num_experts, bias=False)
        self.num_experts = num_experts
        self.k = k

        # Capacity; see [Note: capacity].
        self.capacity_factor = capacity_factor
        self.eval_capacity_factor = eval_capacity_factor
        self.min_capacity = min_capacity
        self.drop_tokens = drop_tokens
        # Top-1: which tokens stay in a full expert is drawn at random; else the earliest.
        self.use_rts = use_rts
        # Top-k, k > 2: which tokens stay in a full expert, see `topk`.
        self.drop_policy = drop_policy

        # Noise for choosing.
        self.noise = noisy_gate_policy if noisy_gate_policy != "None" else None
        self.sample_second = top2_2nd_expert_sampling

    def forward(
        self,
        x: Float[Tensor, "tokens hidden"],
        used_token: Shaped[Tensor, "*tokens_of_batch"] | None = None,
    ) -> Routing:
        """The routing of the tokens x.

        used_token: one value per token, 0 where a token goes nowhere (top-1 only).

        Raises UsageError for fewer tokens than min_capacity, where tokens may be dropped.
        """
        if used_token is not None and self.k != 1:
            raise UsageError(f"used_token is for top-1 gating, and this layer has k={self.k}")
        # Jitter is on the router's input, RSample on its logits.
        if self.noise == "Jitter" and self.training:
            x = x * torch.empty_like(x).uniform_(1.0 - JITTER, 1.0 + JITTER)
        logits = self.wg(x)
        capacity = self.capacity(len(x))
        if self.k == 1:
            gumbel = _gumbel(logits) if self.noise == "RSample" and self.training else None
            # Random token selection: without it the end of a sequence would be dropped most often.
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
        """The most choices an expert accepts of so many tokens; None: all.

        Raises UsageError for too few tokens.
        """
        if not self.drop_tokens:
            return None
        if self.k == 1 and tokens < self.min_capacity:
            raise UsageError(
                f"top-1 gating got {tokens} tokens, fewer than min_capacity {self.min_capacity}; "
                "give larger micro-batches, a smaller min_capacity, or drop_tokens=False"
            )
        factor = self.capacity_factor if self.training else self.eval_capacity_factor
        return capacity_of(tokens, self.num_experts, self.k * factor, self.min_capacity)
