"""What must be the same on several ranks: weights, reduced gradients and the norm, compared by their
checksums.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ds_core import comm
from ds_numerics.trace import Key, Kind
from ds_numerics.verdict import ranks_text

if TYPE_CHECKING:
    from ds_core.context import Context
    from ds_core.gradients import GradientShard
    from ds_core.mesh import Mesh

Rows = dict[tuple[str, ...], dict[str, int]]
"""By the axes along which ranks must have the same: what, and its checksum."""


def rows_of(ctx: Context, values: Mapping[Key, int], shards: Iterable[GradientShard]) -> Rows:
    """This rank's weights, reduced gradients and norm among `values`."""
    mesh = ctx.mesh
    held = {info.name: info.held for info in ctx.params.values()}
    sharded = {shard.name: shard.axes for shard in shards}
    rows: Rows = {}
    for key, value in values.items():
        differ: tuple[str, ...] = ()
        if key.kind is Kind.WEIGHT:
            differ = held[key.name]
        elif key.kind is Kind.REDUCED:
            differ = sharded[key.name]
        elif key.kind is not Kind.NORM:
            continue
        if axes := others(mesh, differ):
            rows.setdefault(axes, {})[key.what] = value
    return rows


def others(mesh: Mesh, differ: Iterable[str]) -> tuple[str, ...]:
    """The axes along which ranks have the same, where they differ along `differ`."""
    without = set(mesh.expand(differ))
    return tuple(axis for axis in mesh.expand(mesh.names) if axis not in without)


def compare(ctx: Context, rows: Rows) -> list[str]:
    """What differs between ranks, in words, the same on all ranks. Collective."""
    wrong = [
        [what, ctx.mesh.ranks(*axes), ctx.rank, mine[what]]
        for axes, mine in sorted(rows.items())
        for what in _unequal(ctx, axes, mine)
    ]
    if not agree(ctx, bool(wrong)):
        return []
    found: dict[tuple[str, tuple[int, ...]], dict[int, int]] = {}
    for told in comm.all_gather_json(wrong):
        for what, ranks, rank, value in told:
            found.setdefault((what, tuple(ranks)), {})[rank] = value
    return [_describe(what, values) for (what, _), values in found.items()]


def agree(ctx: Context, flag: bool) -> bool:
    """Whether `flag` is set on any rank. Collective."""
    if ctx.world_size == 1:
        return flag
    told = torch.tensor([flag], dtype=torch.uint8, device=ctx.accelerator.current_device())
    comm.label("whether any rank found a difference")
    comm.all_reduce(told, op=torch.distributed.ReduceOp.MAX)
    return bool(told.item())


def _unequal(ctx: Context, axes: tuple[str, ...], mine: Mapping[str, int]) -> list[str]:
    """Of what ranks along `axes` have different checksums. Collective along them."""
    device = ctx.accelerator.current_device()
    values = torch.tensor(list(mine.values()), dtype=torch.int64, device=device)
    # The largest, and (by the complement, which turns the order round) the smallest, at once.
    ends: Tensor = torch.cat([values, ~values])
    comm.label("checksums of what is equal on ranks")
    comm.all_reduce(ends, op=torch.distributed.ReduceOp.MAX, group=ctx.mesh.group(*axes))
    largest, smallest = ends.split(len(values))
    unequal = (largest != ~smallest).tolist()
    return [what for what, differs in zip(mine, unequal, strict=True) if differs]


def _describe(what: str, values: Mapping[int, int]) -> str:
    (value, count), *_ = Counter(values.values()).most_common()
    ranks = sorted(values)
    if 2 * count <= len(ranks):
        return f"{what} differs between {ranks_text(ranks)}, without a majority that is right"
    odd = [rank for rank in ranks if values[rank] != value]
    same = [rank for rank in ranks if values[rank] == value]
    return f"{ranks_text(odd)}: {what} is not the one that {ranks_text(same)} have"
