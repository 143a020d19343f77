"""Tokens to their experts and back: one permutation, one all-to-all each way, one weighted sum.

[Note: who calls collectives] Over an expert-parallel group every rank takes part in every exchange,
also one that has no token, or whose experts have none. So the order of collectives depends on the
model alone, never on the routing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from ds_core import comm
from ds_moe.kernels.grouped import Groups

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ds_core.kernels import Kernels

Run = Callable[[Tensor, Groups], Tensor]
"""``run(rows [M, H], groups) -> [M, H']``: the experts of this rank, on rows sorted by expert."""


def _nothing() -> None:
    pass


def dispatch(
    tokens: Tensor,
    experts: Tensor,
    weights: Tensor,
    run: Run,
    *,
    num_experts: int,
    group: ProcessGroup | None = None,
    weigh: Literal["after", "before"] = "after",
    kernels: Kernels | None = None,
    meanwhile: Callable[[], object] = _nothing,
) -> Tensor:
    """Send each token to its experts, run them, and sum what comes back: ``[N, H']``.

    tokens: [N, H]. experts: int64 [N, k], global numbers in 0 .. num_experts - 1, or -1: this
    choice was dropped, and adds nothing. weights: [N, k], of any float dtype; those of dropped
    choices are never used. run: see `Run`; it is called once, also with no rows, and its output
    must keep the order of rows. group: the expert-parallel ranks, of which rank i has experts i *
    num_experts / size and following; None (or `ALONE`): all experts are here. weigh: whether
    weights multiply what experts give, or what they get. kernels: whose `plan`, `sums` and
    `weigh_back` are used; None: these. meanwhile: called once, before `run`; what it does, and its
    way back, overlaps with rows that travel.

    Differentiable in tokens, weights, and what `run` uses. Collective over `group`, forward and
    backward; each rank may have another N, also 0.
    """
    there = _serving("expert_plan", plan, kernels, experts)(experts, num_experts)
    flat = weights.to(tokens.dtype).reshape(-1)
    x: Tensor = _PermuteTokens.apply(tokens, there, kernels)  # type: ignore[no-untyped-call]
    if weigh == "before":
        x = x * flat[there.order][:, None]
    x, groups, back = to_experts(x, there.counts, group, meanwhile)
    y = back(run(x, groups))
    out: Tensor = _CombineTokens.apply(y, flat if weigh == "after" else None, there, kernels)  # type: ignore[no-untyped-call]
    return out


@dataclass(frozen=True, slots=True)
class DispatchPlan:
    """The permutation of M choices that were not dropped, of N tokens with k choices each.

    order: [M], the choices, as places in ``experts.view(-1)``, sorted by expert. rows: [M], their
    tokens. counts: choices per global expert. choices: [M], the choices again, in order of tokens;
    None: none was dropped. places: [M], where each of them stands in `order`. begins: [N], where
    each token's begin among them; None: each has just one.
    """

    order: Tensor
    rows: Tensor
    counts: Tensor
    choices: Tensor | None
    places: Tensor
    begins: Tensor | None


def plan(experts: Tensor, num_experts: int) -> DispatchPlan:
    """experts: [N, k], see `dispatch`. Kernel ``expert_plan``."""
    k = experts.shape[1]
    flat = experts.reshape(-1)
    device = experts.device
    counts = torch.bincount(flat + 1, minlength=num_experts + 1)
    order = torch.sort(flat, stable=True).indices
    everything = torch.arange(len(flat), device=device)
    choices = None
    begins = everything[::k] if k > 1 else None
    if len(flat) and int(counts[0]):  # some were dropped, and come first
        order = order[int(counts[0]) :]
        here = experts >= 0
        choices = everything[here.view(-1)]
        begins = here.sum(1).cumsum(0)
        begins = torch.cat([begins.new_zeros(1), begins[:-1]])
    places = torch.empty_like(flat)
    places[order] = everything[: len(order)]
    rows = order if k == 1 else torch.div(order, k, rounding_mode="floor")
    return DispatchPlan(
        order, rows, counts[1:], choices, places if choices is None else places[choices], begins
    )


def sums(y: Tensor, plan: DispatchPlan, weights: Tensor | None) -> Tensor:
    """Of each token, the sum over its choices of rows of y [M, H], times weights [M] in the order
    of tokens: [N, H].

    Kernel ``expert_sums``; all of one dtype.
    """
    if plan.begins is None:
        rows = y.index_select(0, plan.places)
        return rows if weights is None else rows.mul_(weights[:, None])
    if not len(plan.order):  # which embedding_bag does not take
        return y.new_zeros(len(plan.begins), y.shape[1])
    return F.embedding_bag(plan.places, y, plan.begins, mode="sum", per_sample_weights=weights)


class _PermuteTokens(torch.autograd.Function):
    """Each token's row, once per choice, sorted by expert."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, plan: DispatchPlan, kernels: Kernels | None) -> Tensor:
        ctx.plan = plan
        ctx.kernels = kernels
        return tokens.index_select(0, plan.rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _serving("expert_sums", sums, ctx.kernels, grad)(grad, ctx.plan, None), None, None


class _CombineTokens(torch.autograd.Function):
    """The way back: each token's rows, times its weights (None: 1), summed."""

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, weights: Tensor | None, plan: DispatchPlan, kernels: Kernels | None
    ) -> Tensor:
        ctx.plan = plan
        ctx.kernels = kernels
        ctx.save_for_backward(y, weights)
        if weights is not None and plan.choices is not None:
            weights = weights[plan.choices]
        found: Tensor = _serving("expert_sums", sums, kernels, y)(y, plan, weights)
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        plan = ctx.plan
        kernels = ctx.kernels
        (y, weights) = ctx.saved_tensors
        if weights is None:
            return grad.index_select(0, plan.rows), None, None, None
        return (
            *_serving("expert_weigh_back", weigh_back, kernels, y)(grad, y, weights, plan),
            None,
            None,
        )


def _serving(
    op: str, reference: Callable[..., Any], kernels: Kernels | None, like: Tensor
) -> Callable[..., Any]:
    return reference if kernels is None else kernels.serving(op, like)


def weigh_back(
    grad: Tensor, y: Tensor, weights: Tensor, plan: DispatchPlan
) -> tuple[Tensor, Tensor]:
    """The gradients of y [M, H] and of weights [N * k], from that of the tokens' sums [N, H].

    Kernel ``expert_weigh_back``; all of one dtype. Weights of choices that were dropped get 0.
    """
    rows = grad.index_select(0, plan.rows)
    of_weights = torch.zeros_like(weights)
    of_weights[plan.order] = torch.linalg.vecdot(rows, y)
    return rows.mul_(weights[plan.order][:, None]), of_weights


def to_experts(
    x: Tensor, counts: Tensor, group: ProcessGroup | None, meanwhile: Callable[[], object]
) -> tuple[Tensor, Groups, Callable[[Tensor], Tensor]]:
    """Rows that are sorted by global expert, to the ranks that have the experts.

    counts: rows per global expert. meanwhile: see `dispatch`. Returns this rank's experts' rows,
    sorted by expert, their groups, and the way back.
    """
    size = comm.world_size(group) if group is not None else 1
    if size == 1:
        meanwhile()
        return x, Groups(counts), lambda y: y
    theirs = torch.empty_like(counts)
    comm.all_to_all_single(theirs, counts, group=group)
    given = counts.view(size, -1).sum(1).tolist()
    theirs = theirs.view(size, -1)
    taken = theirs.sum(1).tolist()
    here = theirs.shape[1]
    order = inverse = None

    def prepare() -> None:
        nonlocal order, inverse
        meanwhile()
        if here > 1:
            label = torch.repeat_interleave(
                torch.arange(here, device=x.device).repeat(size), theirs.reshape(-1)
            )
            order = torch.sort(label, stable=True).indices
            inverse = torch.empty_like(order)
            inverse[order] = torch.arange(len(order), device=x.device)

    rows = exchange(x, given, taken, group, prepare)
    groups = Groups(theirs.sum(0))

    def back(y: Tensor) -> Tensor:
        return exchange(y if inverse is None else y.index_select(0, inverse), taken, given, group)

    return rows if order is None else rows.index_select(0, order), groups, back


def exchange(
    x: Tensor,
    given: list[int],
    taken: list[int],
    group: ProcessGroup | None,
    meanwhile: Callable[[], object] = _nothing,
) -> Tensor:
    """Rows to the other ranks, `given[i]` to rank i; `taken[i]` come from it. Differentiable;
    collective.

    meanwhile: called while they travel. Its way back runs while the gradients of rows travel:
    autograd takes nodes that are ready in the reverse of the order in which they were made, and
    both ends of the exchange are nodes.
    """
    exchange = _Exchange(given, taken, group)
    out: Tensor = _SendTokens.apply(x, exchange)  # type: ignore[no-untyped-call]
    meanwhile()
    arrived: Tensor = _ReceiveTokens.apply(out, exchange)  # type: ignore[no-untyped-call]
    return arrived


@dataclass(slots=True)
class _Exchange:
    """Rows on their way, or their gradients on their way back. sent, out: what must live until they
    have come.
    """

    given: list[int]
    taken: list[int]
    group: ProcessGroup | None
    work: comm.Work | None = None
    sent: Tensor | None = None
    out: Tensor | None = None

    def begin(self, x: Tensor, given: list[int], taken: list[int]) -> Tensor:
        """Send rows of `x`; what comes is in the answer once `end` was called."""
        self.sent = x.contiguous()
        self.out = x.new_empty(sum(taken), *x.shape[1:])
        self.work = comm.all_to_all_single(
            self.out, self.sent, taken, given, group=self.group, async_op=True
        )
        return self.out

    def end(self) -> Tensor:
        """Wait until all have come; they."""
        if self.work is not None:
            self.work.wait()
        out = self.out
        self.work = self.sent = self.out = None
        assert out is not None
        return out


class _SendTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: _Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.begin(x, exchange.given, exchange.taken)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.end(), None


class _ReceiveTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, exchange: _Exchange) -> Tensor:
        ctx.exchange = exchange
        exchange.end()
        ctx.mark_dirty(out)  # and not a view of it, which an expert could not change in place
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        exchange = ctx.exchange
        exchange.begin(grad, exchange.taken, exchange.given)
        # what `_SendTokens` is to give is of another size, and comes by the exchange
        return grad, None
