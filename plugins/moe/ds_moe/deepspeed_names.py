"""Functions of ``deepspeed.moe`` that other layers are built of: gating as dense tensors, and
exchange of tokens.

`MoE` uses none of it: `ds_moe.gating` decides the same in memory that is linear in tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp
from torch.nn import functional as F

from ds_core import comm
from ds_core.errors import UsageError
from ds_core.process import STATE
from ds_moe.gating import JITTER, Routing, capacity_of, top1, top2, topk

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def einsum(rule: str, a: Tensor, b: Tensor) -> Tensor:
    """`torch.einsum` of two tensors."""
    return torch.einsum(rule, a, b)


def gumbel_rsample(shape: Any, device: torch.device | str) -> Tensor:
    """Numbers of Gumbel's distribution."""
    return -torch.empty(shape, device=device).exponential_().log()


def multiplicative_jitter(x: Tensor, device: torch.device | str, epsilon: float = JITTER) -> Tensor:
    """`x` times random numbers between 1 - epsilon and 1 + epsilon."""
    return (
        x * torch.empty(x.shape, device=device).uniform_(1.0 - epsilon, 1.0 + epsilon)
        if epsilon
        else x
    )


# -- gating ----------------------------------------------------------------------------------------


def _capacity(gates: Tensor, capacity_factor: Any, min_capacity: Any) -> Tensor:
    """The most tokens that an expert accepts."""
    return torch.tensor(_places(gates, float(capacity_factor), int(min_capacity)))


def _places(logits: Tensor, factor: float, min_capacity: int) -> int:
    return capacity_of(len(logits), logits.shape[1], factor, min_capacity)


def top1gating(
    logits: Tensor,
    capacity_factor: float,
    min_capacity: int,
    used_token: Tensor | None = None,
    noisy_gate_policy: str | None = None,
    drop_tokens: bool = True,
    use_rts: bool = True,
    ep_group: ProcessGroup | None = None,
    sparse_routes: bool = False,
    use_tutel: bool = False,
) -> tuple[Any, ...]:
    """Each token to its best expert, as `topkgating` gives it.

    Raises UsageError for fewer tokens than min_capacity.
    """
    if drop_tokens and len(logits) < min_capacity:
        raise UsageError(
            f"top-1 gating got {len(logits)} tokens, fewer than min_capacity {min_capacity}; "
            "lower it"
        )
    capacity = _places(logits, capacity_factor, min_capacity) if drop_tokens else None
    gumbel = gumbel_rsample(logits.shape, logits.device) if noisy_gate_policy == "RSample" else None
    priority = torch.rand(len(logits), device=logits.device) if use_rts and drop_tokens else None
    routing = top1(logits, capacity, used=used_token, gumbel=gumbel, priority=priority)
    return _dense(routing, capacity, ep_group, sparse_routes, by_choice=False)


def top2gating(
    logits: Tensor,
    capacity_factor: float,
    min_capacity: int,
    drop_tokens: bool = True,
    ep_group: ProcessGroup | None = None,
    top2_2nd_expert_sampling: bool = True,
    sparse_routes: bool = False,
) -> tuple[Any, ...]:
    """Each token to two experts, as `topkgating` gives it."""
    capacity = _places(logits, 2 * capacity_factor, min_capacity) if drop_tokens else None
    gumbel = gumbel_rsample(logits.shape, logits.device) if top2_2nd_expert_sampling else None
    return _dense(
        top2(logits, capacity, gumbel=gumbel), capacity, ep_group, sparse_routes, by_choice=True
    )


def topkgating(
    logits: Tensor,
    k: int,
    capacity_factor: float,
    min_capacity: int,
    drop_tokens: bool = True,
    ep_group: ProcessGroup | None = None,
    drop_policy: str = "probs",
    sparse_routes: bool = False,
) -> tuple[Any, ...]:
    """Each token to its `k` best experts.

    Returns (auxiliary loss, combine weights [tokens, experts, capacity], where they are not 0,
    choices of each expert before dropping); with sparse_routes (auxiliary loss, capacity, experts,
    their indices, -1 for none, places and weights, each [k, tokens], choices).

    ep_group: without dropping, experts' places are as many on all its ranks.
    """
    capacity = _places(logits, k * capacity_factor, min_capacity) if drop_tokens else None
    routing = topk(logits, k, capacity, policy=drop_policy)
    return _dense(routing, capacity, ep_group, sparse_routes, by_choice=False)


def _dense(
    routing: Routing,
    capacity: int | None,
    group: ProcessGroup | None,
    sparse: bool,
    *,
    by_choice: bool,
) -> tuple[Any, ...]:
    """by_choice: all first choices come before all second ones in an expert's places, else tokens
    in their order.
    """
    experts = len(routing.counts)
    if capacity is None:
        # Without dropping, the fullest expert sets the capacity, the same on all ranks: dense
        # tensors are exchanged in equal parts.
        largest = routing.counts.max()
        if group is not None and comm.world_size(group) > 1:
            comm.all_reduce(largest, op=ReduceOp.MAX, group=group)
        capacity = int(largest)
    kept = routing.experts >= 0
    weights = routing.weights * kept
    # Transposed, all first choices come before all second ones.
    ordered = routing.experts.t() if by_choice else routing.experts
    # A choice's place is the number of choices of the same expert before it.
    chosen = F.one_hot(ordered.reshape(-1) + 1, experts + 1)[:, 1:]
    flat = ((chosen.cumsum(0) - 1) * chosen).sum(1).view_as(ordered)
    places = flat.t() if by_choice else flat
    if sparse:
        routes = (routing.experts.int(), places.int(), weights)
        return (
            routing.l_aux,
            capacity,
            experts,
            *(r.t().contiguous() for r in routes),
            routing.counts,
        )
    combine = weights.new_zeros(len(kept), experts * capacity + 1)
    # Dropped choices go to one more slot at the end, which is cut off.
    slots = torch.where(kept, routing.experts * capacity + places, experts * capacity)
    combine = combine.scatter_add(1, slots, weights)[:, :-1].view(len(kept), experts, capacity)
    return routing.l_aux, combine, combine.bool(), routing.counts


# -- exchange --------------------------------------------------------------------------------------


class _AllToAll(torch.autograd.Function):
    """``_AllToAll.apply(group, input)``: the i-th part of `input` goes to rank i; gradients go
    back.
    """

    @staticmethod
    def forward(ctx: Any, group: ProcessGroup | None, input: Tensor) -> Tensor:
        """The parts that come, in the order of ranks."""
        ctx.group = group
        out = torch.empty_like(input, memory_format=torch.contiguous_format)
        comm.all_to_all_single(out, input.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        """The same exchange."""
        # The exchange of equal parts is its own inverse. As a function again, so that second
        # derivatives work.
        return None, _apply(_AllToAll, ctx.group, grad)


def gather_tokens(input_: Tensor, dim: int = 0) -> Tensor:
    """The tokens of all tensor-parallel ranks of the newest engine, along `dim`; as given without
    such ranks.
    """
    group = _tensor_group()
    return input_ if group is None else _apply(_GatherTokens, input_, dim, group)


def drop_tokens(input_: Tensor, dim: int = 0) -> Tensor:
    """This tensor-parallel rank's equal part of the tokens along `dim`; as given without such
    ranks.
    """
    group = _tensor_group()
    if group is None:
        return input_
    if input_.shape[dim] % comm.world_size(group):
        raise UsageError(
            f"drop_tokens: dimension {dim} of {tuple(input_.shape)} cannot be divided over "
            f"{comm.world_size(group)} tensor-parallel ranks"
        )
    return _apply(_DropTokens, input_, dim, group)


def _apply(function: Any, *args: Any) -> Tensor:
    out: Tensor = function.apply(*args)
    return out


def _tensor_group() -> ProcessGroup | None:
    """Those that divide the layers of the newest engine; None without, or for one rank."""
    mesh = STATE.engines[-1].ctx.mesh if STATE.engines else None
    return mesh.group("tp") if mesh is not None and mesh.has("tp") and mesh.size("tp") > 1 else None


def _gather(part: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    # The collective joins along a new first dimension; the parts are then put side by side along
    # `dim`.
    whole = part.new_empty(comm.world_size(group), *part.shape)
    comm.all_gather_into_tensor(whole, part.contiguous(), group=group)
    return torch.cat(whole.unbind(), dim)


def _drop(whole: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    return whole.chunk(comm.world_size(group), dim)[comm.rank(group)].contiguous()


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        ctx.how = (dim, group)
        return _gather(part, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        # Every rank continues with the same tokens, so the gradient is the same everywhere: each
        # keeps its part, and nothing is summed.
        return _drop(grad, *ctx.how), None, None


class _DropTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        ctx.how = (dim, group)
        return _drop(whole, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _gather(grad, *ctx.how), None, None
