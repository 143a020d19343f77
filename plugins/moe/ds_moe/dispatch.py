"""Tokens to their experts and back: one permutation, one all-to-all each way, one weighted sum.

Dimensions: ``tokens`` of this rank, each with ``k`` choices; ``kept`` choices that were not
dropped; ``rows`` that arrived at this rank's experts; ``hidden`` and ``out``, the widths of what
experts are given and of what they give; ``experts`` of all ranks.

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
    from jaxtyping import Float, Int
    from torch.distributed import ProcessGroup

    from ds_core.kernels import Kernels

Run = Callable[[Tensor, Groups], Tensor]
"""``run([rows, hidden], groups) -> [rows, out]``: the experts of this rank, on rows sorted by expert.
"""


def _nothing() -> None:
    pass


def dispatch(
    tokens: Float[Tensor, "tokens hidden"],
    experts: Int[Tensor, "tokens k"],
    weights: Float[Tensor, "tokens k"],
    run: Run,
    *,
    num_experts: int,
    group: ProcessGroup | None = None,
    weigh: Literal["after", "before"] = "after",
    kernels: Kernels | None = None,
    meanwhile: Callable[[], object] = _nothing,
) -> Float[Tensor, "tokens out"]:
    """Send each token to its experts, run them, and sum what comes back.

    experts: int64, global numbers in 0 .. num_experts - 1; or -1: this choice was dropped, and adds
        nothing.
    weights: of any float dtype; those of dropped choices are never used.
    run: see `Run`; called once, also with no rows. Its output must keep the order of rows.
    group: the expert-parallel ranks, of which rank i has num_experts / size experts from
        i * num_experts / size on; None (or `ALONE`): this rank has all experts.
    weigh: whether weights multiply what experts give, or what they are given.
    kernels: whose `plan`, `sums` and `weigh_back` are used; None: the functions of this module.
    meanwhile: called once, before `run`; what it does, and its backward, overlaps with the exchange
        of rows.

    Differentiable in tokens, weights, and what `run` uses. Collective over `group`, forward and
    backward; each rank may have another number of tokens, also 0.
    """
    if torch.compiler.is_compiling():
        # A graph ends here: how many rows each expert gets depends on values.
        outside: Tensor = torch.compiler.disable(dispatch)(
            tokens,
            experts,
            weights,
            run,
            num_experts=num_experts,
            group=group,
            weigh=weigh,
            kernels=kernels,
            meanwhile=meanwhile,
        )
        return outside
    # 1. Which rows, in which order; this is the only sort of a dispatch.
    there = _serving("expert_plan", plan, kernels, experts)(experts, num_experts)
    flat = weights.to(tokens.dtype).reshape(-1)
    # 2. One row per choice that was kept, sorted by expert.
    x: Tensor = _PermuteTokens.apply(tokens, there, kernels)  # type: ignore[no-untyped-call]
    # Llama 4's way: the score scales the input, so it goes through the activation.
    if weigh == "before":
        x = x * flat[there.order][:, None]
    # 3. Rows go to the ranks that have their experts, through the experts, and back.
    x, groups, back = to_experts(x, there.counts, group, meanwhile)
    y = back(run(x, groups))
    # 4. The weighted sum over each token's choices, in the order of tokens. Under autocast experts
    # give another dtype than they are given.
    dtype = torch.promote_types(tokens.dtype, y.dtype)
    y = y.to(dtype)
    flat = flat.to(dtype)
    out: Tensor = _CombineTokens.apply(y, flat if weigh == "after" else None, there, kernels)  # type: ignore[no-untyped-call]
    return out


@dataclass(frozen=True, slots=True)
class DispatchPlan:
    """The permutation of the choices that were kept.

    A choice is a place in ``experts.view(-1)``: token number x k + number of the choice.
    """

    order: Int[Tensor, " kept"]
    """The choices, sorted by expert."""
    rows: Int[Tensor, " kept"]
    """Their tokens."""
    counts: Int[Tensor, " experts"]
    """How many choices each global expert has."""
    choices: Int[Tensor, " kept"] | None
    """The choices again, in the order of tokens; None: none was dropped, so these are all."""
    places: Int[Tensor, " kept"]
    """Where each of `choices` stands in `order`."""
    begins: Int[Tensor, " tokens"] | None
    """Where each token's choices begin among `choices`; None: each token has just one."""


def plan(experts: Int[Tensor, "tokens k"], num_experts: int) -> DispatchPlan:
    """The permutation that `dispatch` follows; for experts see there. Kernel ``expert_plan``."""
    k = experts.shape[1]
    flat = experts.reshape(-1)
    device = experts.device
    # bincount accepts no negative number: the first bin counts dropped choices (-1).
    counts = torch.bincount(flat + 1, minlength=num_experts + 1)
    # Stable: within an expert rows stay in the order of tokens, so sums are the same each time.
    order = torch.sort(flat, stable=True).indices
    everything = torch.arange(len(flat), device=device)
    choices = None
    begins = everything[::k] if k > 1 else None
    if len(flat) and int(counts[0]):
        # Some were dropped, and come first in the sorted order: they are left out everywhere, and a
        # token's choices are no longer k places apart.
        order = order[int(counts[0]) :]
        here = experts >= 0
        choices = everything[here.view(-1)]
        begins = here.sum(1).cumsum(0)
        begins = torch.cat([begins.new_zeros(1), begins[:-1]])
    # The inverse permutation, by which rows find back to their tokens.
    places = torch.empty_like(flat)
    places[order] = everything[: len(order)]
    rows = order if k == 1 else torch.div(order, k, rounding_mode="floor")
    return DispatchPlan(
        order, rows, counts[1:], choices, places if choices is None else places[choices], begins
    )


def sums(
    y: Float[Tensor, "kept out"], plan: DispatchPlan, weights: Float[Tensor, " kept"] | None
) -> Float[Tensor, "tokens out"]:
    """For each token, the sum over its choices of rows of y, times weights in the order of tokens.

    Kernel ``expert_sums``; all of one dtype.
    """
    # One choice per token, none dropped: a permutation, and no sum.
    if plan.begins is None:
        rows = y.index_select(0, plan.places)
        return rows if weights is None else rows.mul_(weights[:, None])
    # embedding_bag does not accept an empty list of places
    if not len(plan.order):
        return y.new_zeros(len(plan.begins), y.shape[1])
    # A bag per token: gathers and adds rows in one pass, without a tensor of [tokens x k, out].
    return F.embedding_bag(plan.places, y, plan.begins, mode="sum", per_sample_weights=weights)


class _PermuteTokens(torch.autograd.Function):
    """Each token's row, once per choice, sorted by expert."""

    @staticmethod
    def forward(
        ctx: Any,
        tokens: Float[Tensor, "tokens hidden"],
        plan: DispatchPlan,
        kernels: Kernels | None,
    ) -> Float[Tensor, "kept hidden"]:
        ctx.plan = plan
        ctx.kernels = kernels
        return tokens.index_select(0, plan.rows)

    @staticmethod
    def backward(
        ctx: Any, grad: Float[Tensor, "kept hidden"]
    ) -> tuple[Float[Tensor, "tokens hidden"], None, None]:
        # A token's gradient is the sum over its rows: the same bags as in the combine, unweighted.
        return _serving("expert_sums", sums, ctx.kernels, grad)(grad, ctx.plan, None), None, None


class _CombineTokens(torch.autograd.Function):
    """The way back: each token's rows, times its weights (None: 1), summed.

    As one function it saves y and the weights alone, and never a tensor of weighted rows.
    """

    @staticmethod
    def forward(
        ctx: Any,
        y: Float[Tensor, "kept out"],
        weights: Float[Tensor, " choices"] | None,
        plan: DispatchPlan,
        kernels: Kernels | None,
    ) -> Float[Tensor, "tokens out"]:
        ctx.plan = plan
        ctx.kernels = kernels
        ctx.save_for_backward(y, weights)
        # Weights are of all choices, rows only of those that were kept.
        if weights is not None and plan.choices is not None:
            weights = weights[plan.choices]
        found: Tensor = _serving("expert_sums", sums, kernels, y)(y, plan, weights)
        return found

    @staticmethod
    def backward(
        ctx: Any, grad: Float[Tensor, "tokens out"]
    ) -> tuple[Float[Tensor, "kept out"], Float[Tensor, " choices"] | None, None, None]:
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
    grad: Float[Tensor, "tokens out"],
    y: Float[Tensor, "kept out"],
    weights: Float[Tensor, " choices"],
    plan: DispatchPlan,
) -> tuple[Float[Tensor, "kept out"], Float[Tensor, " choices"]]:
    """The gradients of y and of weights, from that of the tokens' sums.

    Kernel ``expert_weigh_back``; all of one dtype. Weights of choices that were dropped get 0.
    """
    rows = grad.index_select(0, plan.rows)
    of_weights = torch.zeros_like(weights)
    # A weight's gradient is the product of its row with the gradient of its token.
    of_weights[plan.order] = torch.linalg.vecdot(rows, y)
    return rows.mul_(weights[plan.order][:, None]), of_weights


def to_experts(
    x: Float[Tensor, "kept hidden"],
    counts: Int[Tensor, " experts"],
    group: ProcessGroup | None,
    meanwhile: Callable[[], object],
) -> tuple[Float[Tensor, "rows hidden"], Groups, Callable[[Tensor], Tensor]]:
    """Rows that are sorted by global expert, to the ranks that have the experts.

    counts: rows per global expert.
    meanwhile: see `dispatch`.

    Returns the rows of this rank's experts, sorted by expert; their groups; and the function that
    sends the experts' output back.
    """
    size = comm.world_size(group) if group is not None else 1
    if size == 1:
        meanwhile()
        return x, Groups(counts), lambda y: y
    # 1. The counts first, as an exchange of rows needs to know its sizes: `theirs` has, of each
    # rank, its rows for each of this rank's experts.
    theirs = torch.empty_like(counts)
    comm.all_to_all_single(theirs, counts, group=group)
    # all_to_all_single needs its sizes on the host, so a GPU is waited for here.
    given = counts.view(size, -1).sum(1).tolist()
    theirs = theirs.view(size, -1)
    taken = theirs.sum(1).tolist()
    here = theirs.shape[1]
    order = inverse = None

    def prepare() -> None:
        nonlocal order, inverse
        meanwhile()
        # Rows arrive sorted by sender, and then by expert; a rank with one expert has no need to
        # sort. The labels follow from the counts, so the sort overlaps with the exchange.
        if here > 1:
            label = torch.repeat_interleave(
                torch.arange(here, device=x.device).repeat(size), theirs.reshape(-1)
            )
            order = torch.sort(label, stable=True).indices
            inverse = torch.empty_like(order)
            inverse[order] = torch.arange(len(order), device=x.device)

    # 2. The rows. 3. By expert.
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
    """Rows to the other ranks, `given[i]` to rank i; `taken[i]` come from it.

    Differentiable; collective.

    meanwhile: called during the exchange. Its backward runs during that of the gradients:
    autograd runs nodes that are ready in the reverse of the order in which they were made, and
    both ends of the exchange are nodes.
    """
    exchange = _Exchange(given, taken, group)
    out: Tensor = _SendTokens.apply(x, exchange)  # type: ignore[no-untyped-call]
    meanwhile()
    arrived: Tensor = _ReceiveTokens.apply(out, exchange)  # type: ignore[no-untyped-call]
    return arrived


@dataclass(slots=True)
class _Exchange:
    """Rows on their way, or their gradients on their way back."""

    given: list[int]
    """Rows for each rank."""
    taken: list[int]
    """Rows from each rank."""
    group: ProcessGroup | None
    work: comm.Work | None = None
    """The collective under way."""
    sent: Tensor | None = None
    """Its input, which must live until it is done."""
    out: Tensor | None = None
    """Its output, likewise."""

    def begin(self, x: Tensor, given: list[int], taken: list[int]) -> Tensor:
        """Send rows of `x`; the answer has what arrives, but only after `end`."""
        self.sent = x.contiguous()
        self.out = x.new_empty(sum(taken), *x.shape[1:])
        self.work = comm.all_to_all_single(
            self.out, self.sent, taken, given, group=self.group, async_op=True
        )
        return self.out

    def end(self) -> Tensor:
        """Wait until all rows have arrived, and return them."""
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
        # The collective was begun by the backward of `_ReceiveTokens`, which runs first.
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
        # Autograd checks that a gradient has its tensor's shape. What `_SendTokens` returns has
        # another one, and is passed by the exchange.
        return grad, None
