"""Collectives with gradients.

Each backward is another of these functions, so that gradients have gradients too.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.distributed import ProcessGroup

from ds_comm_autograd import collectives
from ds_comm_autograd.collectives import Members, Sizes
from ds_core.comm import ALONE
from ds_core.errors import CommError


def copy_to(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """`x` itself; gradients are added over the ranks.

    For a tensor that all ranks have, where each goes on with work of its own (a column-parallel
    layer's input, a replicated weight that is used on each rank's own heads).
    """
    members = _live(group)
    return x if members is None else _run(_Copy, x, _place(members))


def reduce_from(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """The sum of `x` over the ranks; the gradient goes to each rank as it is.

    For parts of a sum that all ranks then go on with alike (a row-parallel layer's output).
    """
    members = _live(group)
    return x if members is None else _run(_Reduce, x, _place(members))


def mean(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """The average of `x` over the ranks; the gradient goes to each rank as it is.

    For a loss of which each rank has its part, where gradients are averaged over the ranks
    afterwards.
    """
    members = _live(group)
    return x if members is None else _run(_Mean, x, _place(members))


def gather(x: Tensor, group: ProcessGroup | None, dim: int, sizes: Sizes = None) -> Tensor:
    """The parts of all ranks along `dim`; the gradient is this rank's part.

    For ranks that then all do the same with the whole.

    sizes: the ranks' lengths along `dim`, where they differ.
    """
    members = _live(group)
    if members is None:
        return x
    dim = _dim(x, dim)
    _check_sizes("gather", sizes, members, x.shape[dim], mine=True)
    return _run(_Gather, x, _place(members), dim, sizes)


def split(x: Tensor, group: ProcessGroup | None, dim: int, sizes: Sizes = None) -> Tensor:
    """This rank's part of `x` along `dim`; the gradient is that of all parts."""
    members = _live(group)
    if members is None:
        return x
    dim = _dim(x, dim)
    _check_sizes("split", sizes, members, x.shape[dim], mine=False)
    return _run(_Split, x, _place(members), dim, sizes)


def gather_to(x: Tensor, group: ProcessGroup | None, dim: int, sizes: Sizes = None) -> Tensor:
    """The parts of all ranks along `dim`; the gradient is this rank's part of the sum of all ranks'
    gradients.

    For ranks that each do something else with the whole (a column-parallel layer after a region
    that is divided along the sequence).
    """
    members = _live(group)
    if members is None:
        return x
    dim = _dim(x, dim)
    _check_sizes("gather_to", sizes, members, x.shape[dim], mine=True)
    return _run(_GatherTo, x, _place(members), dim, sizes)


def reduce_scatter(x: Tensor, group: ProcessGroup | None, dim: int, sizes: Sizes = None) -> Tensor:
    """This rank's part, along `dim`, of the sum of `x` over the ranks; the gradient is that of all
    parts.
    """
    members = _live(group)
    if members is None:
        return x
    dim = _dim(x, dim)
    _check_sizes("reduce_scatter", sizes, members, x.shape[dim], mine=False)
    return _run(_ReduceScatter, x, _place(members), dim, sizes)


def all_to_all(
    x: Tensor,
    group: ProcessGroup | None,
    cut: int,
    join: int,
    cut_sizes: Sizes = None,
    join_sizes: Sizes = None,
) -> Tensor:
    """Cut `x` along dimension `cut`, send part i to rank i, and join what comes along dimension
    `join`.

    cut_sizes: the lengths of the parts, where they differ.
    join_sizes: the ranks' lengths along `join`, where they differ.

    The gradient takes the same way back.
    """
    members = _live(group)
    if members is None:
        return x
    cut = _dim(x, cut)
    join = _dim(x, join)
    if cut == join:
        raise ValueError(f"all_to_all: cut and join are both dimension {cut}; they must differ")
    _check_sizes("all_to_all", cut_sizes, members, x.shape[cut], mine=False)
    _check_sizes("all_to_all", join_sizes, members, x.shape[join], mine=True)
    return _run(_AllToAll, x, _place(members), cut, join, cut_sizes, join_sizes)


# -- their gradients -------------------------------------------------------------------------------


class _Copy(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Members) -> Tensor:
        ctx.group = group
        # A view: autograd must see another tensor than its input.
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _run(_Reduce, grad, ctx.group), None


class _Reduce(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Members) -> Tensor:
        ctx.group = group
        return collectives.all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _run(_Copy, grad, ctx.group), None


class _Mean(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Members) -> Tensor:
        return collectives.all_reduce(x, group, average=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        # The gradient is not divided here: data parallelism averages it over the same ranks
        # afterwards.
        return grad, None


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Members, dim: int, sizes: Sizes) -> Tensor:
        ctx.group = group
        ctx.dim = dim
        ctx.sizes = sizes
        return collectives.all_gather(x, group, dim, sizes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _run(_Split, grad, ctx.group, ctx.dim, ctx.sizes), None, None, None


class _Split(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Members, dim: int, sizes: Sizes) -> Tensor:
        ctx.group = group
        ctx.dim = dim
        ctx.sizes = sizes
        return collectives.own_part(x, group, dim, sizes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _run(_Gather, grad, ctx.group, ctx.dim, ctx.sizes), None, None, None


class _GatherTo(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Members, dim: int, sizes: Sizes) -> Tensor:
        ctx.group = group
        ctx.dim = dim
        ctx.sizes = sizes
        return collectives.all_gather(x, group, dim, sizes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _run(_ReduceScatter, grad, ctx.group, ctx.dim, ctx.sizes), None, None, None


class _ReduceScatter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Members, dim: int, sizes: Sizes) -> Tensor:
        ctx.group = group
        ctx.dim = dim
        ctx.sizes = sizes
        return collectives.reduce_scatter(x, group, dim, sizes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _run(_GatherTo, grad, ctx.group, ctx.dim, ctx.sizes), None, None, None


class _AllToAll(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        group: Members,
        cut: int,
        join: int,
        cut_sizes: Sizes,
        join_sizes: Sizes,
    ) -> Tensor:
        # Backward is the same exchange with cut and join changed places.
        ctx.back = group, join, cut, join_sizes, cut_sizes
        return collectives.all_to_all(x, group, cut, join, cut_sizes, join_sizes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _run(_AllToAll, grad, *ctx.back), None, None, None, None, None


# -- groups and dimensions -------------------------------------------------------------------------


def _run(function: type[Function], *args: Any) -> Tensor:
    return cast(Tensor, function.apply(*args))


def _live(group: ProcessGroup | None) -> ProcessGroup | None:
    """The group, if it has several ranks."""
    # Without other ranks all of these do nothing, so models need no case of their own.
    if group is ALONE or not dist.is_initialized():
        return None
    members = dist.group.WORLD if group is None else group
    if not isinstance(members, ProcessGroup):
        raise CommError(
            "this rank is not in the group it called a collective on; only its members may call"
        )
    return members if members.size() > 1 else None


def _place(members: ProcessGroup) -> Members:
    """The group as the functions take it: a graph knows it by name."""
    return members.group_name if torch.compiler.is_compiling() else members


def _dim(x: Tensor, dim: int) -> int:
    if not -x.dim() <= dim < x.dim():
        raise IndexError(f"dimension {dim} of a tensor of shape {tuple(x.shape)}")
    return dim % x.dim()


def _check_sizes(name: str, sizes: Sizes, members: ProcessGroup, length: int, mine: bool) -> None:
    """mine: `length` is this rank's; else that of all parts."""
    count = members.size()
    # Checked on each rank before anything is sent: a rank that fails inside a collective leaves the
    # others waiting.
    if sizes is None:
        if not mine and length % count:
            raise ValueError(
                f"{name}: a length of {length} does not divide over {count} ranks; give sizes"
            )
    elif len(sizes) != count or (sizes[members.rank()] if mine else sum(sizes)) != length:
        has = f"this rank's is {length}" if mine else f"the whole is {length}"
        raise ValueError(
            f"{name}: sizes {list(sizes)} for {count} ranks, where {has}; give one per rank"
        )
