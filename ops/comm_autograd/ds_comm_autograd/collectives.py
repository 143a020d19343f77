"""The collectives without gradients: out of place, along any dimension, in parts of any lengths.

Each takes a live group of several ranks, or its name. With a name it is a registered operation of
torch, which is what torch.compile puts into its graphs; a graph has no place for the group itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, distributed_c10d

from ds_core import comm

Members: TypeAlias = ProcessGroup | str
Sizes: TypeAlias = Sequence[int] | None
"""The lengths of the ranks' parts along a dimension; None: all are equal."""


def all_reduce(x: Tensor, group: Members, average: bool = False) -> Tensor:
    """The sum, or the average, of `x` over the ranks."""
    if isinstance(group, str):
        return _call(_all_reduce_op, x, group, average)
    total = x.clone(memory_format=torch.contiguous_format)
    comm.all_reduce(total, op=ReduceOp.AVG if average else ReduceOp.SUM, group=group)
    return total


def all_gather(x: Tensor, group: Members, dim: int, sizes: Sizes) -> Tensor:
    """The parts of all ranks, one after the other along `dim`."""
    if isinstance(group, str):
        return _call(_all_gather_op, x, group, dim, sizes)
    count = group.size()
    if sizes is None:
        # Along a new first dimension, as torch's collective lays parts out; then moved to `dim`.
        parts = x.new_empty((count, *x.shape))
        comm.all_gather_into_tensor(parts, x.contiguous(), group=group)
        return parts.movedim(0, dim).flatten(dim, dim + 1)
    # Collectives of torch have parts of one length.
    longest = max(sizes)
    padded = x.new_empty((longest, *_without(x, dim)))
    padded[: x.shape[dim]] = x.movedim(dim, 0)
    parts = x.new_empty((count, *padded.shape))
    comm.all_gather_into_tensor(parts, padded, group=group)
    rows = torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])
    return rows.movedim(0, dim).contiguous()


def own_part(x: Tensor, group: Members, dim: int, sizes: Sizes) -> Tensor:
    """A copy of this rank's part of `x` along `dim`."""
    if isinstance(group, str):
        return _call(_own_part_op, x, group, dim, sizes)
    rank = group.rank()
    lengths = _lengths(x.shape[dim], sizes, group.size(), spread=True)
    part = x.narrow(dim, sum(lengths[:rank]), lengths[rank])
    return part.clone(memory_format=torch.contiguous_format)


def reduce_scatter(x: Tensor, group: Members, dim: int, sizes: Sizes) -> Tensor:
    """This rank's part, along `dim`, of the sum of `x` over the ranks."""
    if isinstance(group, str):
        return _call(_reduce_scatter_op, x, group, dim, sizes)
    count = group.size()
    if sizes is None:
        parts = x.unflatten(dim, (count, x.shape[dim] // count)).movedim(dim, 0).contiguous()
        mine = x.new_empty(parts.shape[1:])
        comm.reduce_scatter_tensor(mine, parts, group=group)
        return mine
    # Parts of one length; the zeros behind the shorter ones add nothing.
    padded = x.new_zeros((count, max(sizes), *_without(x, dim)))
    for part, rows in zip(padded, x.movedim(dim, 0).split(list(sizes)), strict=True):
        part[: len(rows)] = rows
    mine = x.new_empty(padded.shape[1:])
    comm.reduce_scatter_tensor(mine, padded, group=group)
    return mine[: sizes[group.rank()]].movedim(0, dim).contiguous()


def all_to_all(
    x: Tensor, group: Members, cut: int, join: int, cut_sizes: Sizes, join_sizes: Sizes
) -> Tensor:
    """Send the i-th part of `x` along `cut` to rank i; the parts that come are joined along
    `join`."""
    if isinstance(group, str):
        return _call(_all_to_all_op, x, group, cut, join, cut_sizes, join_sizes)
    count = group.size()
    if cut_sizes is None and join_sizes is None:
        parts = x.unflatten(cut, (count, x.shape[cut] // count)).movedim(cut, 0).contiguous()
        come = torch.empty_like(parts)
        comm.all_to_all_single(come, parts, group=group)
        return come.movedim(0, join).flatten(join, join + 1)
    # Unequal parts go as flat ones, whose sizes torch's collective takes.
    cuts = _lengths(x.shape[cut], cut_sizes, count, spread=True)
    joins = _lengths(x.shape[join], join_sizes, count, spread=False)
    shape = list(x.shape)
    shape[cut] = cuts[group.rank()]
    # What comes from rank i: this rank's cut, and rank i's length along `join`.
    shapes = [
        [joins[i] if d == join else length for d, length in enumerate(shape)] for i in range(count)
    ]
    given = torch.cat([part.reshape(-1) for part in x.split(cuts, cut)])
    takes = [_numel(s) for s in shapes]
    width = x.numel() // x.shape[cut] if x.shape[cut] else 0
    flat = x.new_empty(sum(takes))
    comm.all_to_all_single(flat, given, takes, [size * width for size in cuts], group=group)
    return torch.cat(
        [part.view(s) for part, s in zip(flat.split(takes), shapes, strict=True)], join
    )


def _call(op: Any, *args: Any) -> Tensor:
    return cast(Tensor, op(*args))


def _members(name: str) -> ProcessGroup:
    resolve: Any = distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
    return cast(ProcessGroup, resolve(name))


def _without(x: Tensor, dim: int) -> list[int]:
    return [length for d, length in enumerate(x.shape) if d != dim]


def _lengths(length: int, sizes: Sizes, count: int, spread: bool) -> list[int]:
    """`sizes`, or equal ones.

    spread: they divide `length`; else each is `length`.
    """
    if sizes is not None:
        return list(sizes)
    return [length // count if spread else length] * count


def _numel(shape: Sequence[int]) -> int:
    product = 1
    for length in shape:  # not math.prod: lengths may be symbols
        product *= length
    return product


# -- as operations of torch, for graphs ------------------------------------------------------------


@torch.library.custom_op("ds_comm_autograd::all_reduce", mutates_args=())
def _all_reduce_op(x: Tensor, group: str, average: bool) -> Tensor:
    return all_reduce(x, _members(group), average)


@_all_reduce_op.register_fake
def _(x: Tensor, group: str, average: bool) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("ds_comm_autograd::all_gather", mutates_args=())
def _all_gather_op(x: Tensor, group: str, dim: int, sizes: Sequence[int] | None) -> Tensor:
    return all_gather(x, _members(group), dim, sizes)


@_all_gather_op.register_fake
def _(x: Tensor, group: str, dim: int, sizes: Sequence[int] | None) -> Tensor:
    count = _members(group).size()
    return _resize(x, dim, x.shape[dim] * count if sizes is None else sum(sizes))


@torch.library.custom_op("ds_comm_autograd::own_part", mutates_args=())
def _own_part_op(x: Tensor, group: str, dim: int, sizes: Sequence[int] | None) -> Tensor:
    return own_part(x, _members(group), dim, sizes)


@_own_part_op.register_fake
def _(x: Tensor, group: str, dim: int, sizes: Sequence[int] | None) -> Tensor:
    return _part(x, group, dim, sizes)


@torch.library.custom_op("ds_comm_autograd::reduce_scatter", mutates_args=())
def _reduce_scatter_op(x: Tensor, group: str, dim: int, sizes: Sequence[int] | None) -> Tensor:
    return reduce_scatter(x, _members(group), dim, sizes)


@_reduce_scatter_op.register_fake
def _(x: Tensor, group: str, dim: int, sizes: Sequence[int] | None) -> Tensor:
    return _part(x, group, dim, sizes)


@torch.library.custom_op("ds_comm_autograd::all_to_all", mutates_args=())
def _all_to_all_op(
    x: Tensor,
    group: str,
    cut: int,
    join: int,
    cut_sizes: Sequence[int] | None,
    join_sizes: Sequence[int] | None,
) -> Tensor:
    return all_to_all(x, _members(group), cut, join, cut_sizes, join_sizes)


@_all_to_all_op.register_fake
def _(
    x: Tensor,
    group: str,
    cut: int,
    join: int,
    cut_sizes: Sequence[int] | None,
    join_sizes: Sequence[int] | None,
) -> Tensor:
    members = _members(group)
    mine = _lengths(x.shape[cut], cut_sizes, members.size(), spread=True)[members.rank()]
    joined = sum(_lengths(x.shape[join], join_sizes, members.size(), spread=False))
    return _resize(_resize(x, cut, mine), join, joined)


def _part(x: Tensor, group: str, dim: int, sizes: Sizes) -> Tensor:
    members = _members(group)
    return _resize(
        x, dim, _lengths(x.shape[dim], sizes, members.size(), spread=True)[members.rank()]
    )


def _resize(x: Tensor, dim: int, length: int) -> Tensor:
    """An empty contiguous tensor like `x`, with another length of `dim`."""
    return x.new_empty([length if d == dim else old for d, old in enumerate(x.shape)])
