"""The buckets and gather units in which ZeRO would lay out a model: sizes, no tensors.

They are found by the functions that training calls (`ds_core.gradients.arrange`,
`ds_zero.gather.grouping`), so that a plan cannot differ from a run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from ds_core.gradients import arrange
from ds_zero.buckets.layout import Layout
from ds_zero.gather.grouping import Gatherer, find_leaves, gatherers, members, persistent
from ds_zero.gather.unit import GatherUnit

if TYPE_CHECKING:
    from ds_zero.comm.collectives import WeightGather
    from ds_zero.config import ZeroConfig


@dataclass(frozen=True, slots=True, eq=False)
class SimulatedBucket:
    """The sizes of a `FlatBucket`."""

    params: tuple[nn.Parameter, ...]

    layout: Layout

    dtype: torch.dtype
    """Of the parameters."""

    replicated: bool
    """Whether every rank keeps all weights between steps."""

    trained: bool
    """Whether an optimizer updates it."""

    @property
    def names(self) -> list[str]:
        """Shapes of the parameters, in the place of names in messages."""
        return [str(tuple(p.shape)) for p in self.params]

    @property
    def shard_bytes(self) -> int:
        """Bytes of one rank's shard of the weights."""
        return self.layout.shard_numel * self.dtype.itemsize

    def owned(self, rank: int) -> int:
        """Elements of parameters in the shard of `rank`: without padding."""
        spans = (self.layout.span(index, rank) for index in range(len(self.params)))
        return sum(span.numel for span in spans)


class SimulatedUnit(GatherUnit):
    """A unit of stage 3 that counts how often it would be gathered."""

    def __init__(self, index: int, bucket: SimulatedBucket, leaf: bool) -> None:
        super().__init__(index, bucket.layout.total, leaf, bucket.names[0], bucket.params)
        self.bucket = bucket
        # In one forward and backward.
        self.gathers = 0

    def _begin(self, gather: WeightGather) -> None:
        self.gathers += 1

    def _finish(self) -> None:
        """Nothing to wait for."""

    def _free(self) -> None:
        """Nothing to free."""


@dataclass(frozen=True, slots=True)
class Laid:
    """A model under one stage."""

    buckets: list[SimulatedBucket]

    loose: list[nn.Parameter]
    """Parameters in no bucket: unsharded, and not trained."""

    modules: list[Gatherer]
    """What gathers in stage 3, in the order of the module tree."""

    units: list[SimulatedUnit]
    """What is gathered at a time; each has one of the buckets."""

    @property
    def trained(self) -> list[SimulatedBucket]:
        """The buckets that an optimizer updates."""
        return [bucket for bucket in self.buckets if bucket.trained]


def lay_out(
    module: nn.Module, section: ZeroConfig, world: int, weights_on_host: bool = False
) -> Laid:
    """The buckets in which `section.stage` (1 to 3) would lay the parameters of `module` over
    `world` ranks.

    weights_on_host: even a single rank then gathers.
    """
    everything = list(module.parameters())
    trained = [p for p in everything if p.requires_grad]
    # Small parameters stay unsharded, and lie in buckets as those of stage 2 do.
    shards = section.stage == 3 and (world > 1 or weights_on_host)
    small = persistent(everything, section) if shards else set(everything)
    partitioned = {p for p in everything if p not in small}
    replicated = [p for p in trained if p not in partitioned]
    buckets = list(_arrange(replicated, section.bucket_elements(world), world, replicated=True))

    # All others are gathered by the module that uses them first. What is trained and what is not
    # lies apart, since only the former has gradients and states.
    leaves = find_leaves(module, section.leaf_module) if shards else set()
    modules = gatherers(module, partitioned, section, leaves)
    units: list[SimulatedUnit] = []
    for gatherer, chosen, is_trained in members(modules, set(trained)):
        capacity = section.unit_elements(world)
        for bucket in _arrange(chosen, capacity, world, replicated=False, trained=is_trained):
            units.append(SimulatedUnit(len(units), bucket, gatherer.leaf))
    loose = [p for p in everything if p in small and not p.requires_grad]
    return Laid(buckets + [unit.bucket for unit in units], loose, modules, units)


def _arrange(
    params: Sequence[nn.Parameter],
    capacity: int,
    world: int,
    *,
    replicated: bool,
    trained: bool = True,
) -> Iterator[SimulatedBucket]:
    """Buckets of at most `capacity` elements, each of one dtype."""
    runs = arrange(
        params,
        lambda p: (p.dtype, p.requires_grad),
        lambda _, filled, size: filled + size > capacity,
    )
    for run in runs:
        layout = Layout.of([p.numel() for p in run], world)
        yield SimulatedBucket(tuple(run), layout, run[0].dtype, replicated, trained)


def bytes_of(params: Iterable[nn.Parameter]) -> int:
    """Bytes of full parameters, without padding."""
    return sum(p.numel() * p.element_size() for p in params)
