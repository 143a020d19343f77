"""The arithmetic of flat buffers, for any sizes and world."""

from __future__ import annotations

import itertools

import torch
from ds_zero.buckets.layout import Layout
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ds_core.gradients import arrange

SIZES = st.lists(st.integers(0, 50), max_size=12)


@given(SIZES, st.integers(1, 9))
def test_every_element_belongs_to_exactly_one_rank(sizes: list[int], world: int) -> None:
    layout = Layout.of(sizes, world)
    assert layout.total == layout.shard_numel * world >= sum(sizes)
    for index, size in enumerate(sizes):
        spans = [layout.span(index, rank) for rank in range(world)]
        owned = [i for s in spans for i in range(s.start, s.stop)]
        assert owned == list(range(size))
        for rank, span in enumerate(spans):
            if span.stop > span.start:
                assert rank * layout.shard_numel + span.at == layout.offsets[index] + span.start
                assert span.at + span.stop - span.start <= layout.shard_numel


@given(SIZES, st.integers(1, 9))
def test_parts_are_equal_and_padding_is_small(sizes: list[int], world: int) -> None:
    layout = Layout.of(sizes, world)
    assert layout.total - sum(sizes) < 2 * world
    if world == 1:
        assert layout.total == sum(sizes)


@given(SIZES, st.integers(1, 100))
def test_runs_hold_everything_in_order_and_keep_to_the_capacity(
    sizes: list[int], capacity: int
) -> None:
    params = [nn.Parameter(torch.empty(n)) for n in sizes]
    found = arrange(params, lambda _: None, lambda _, filled, size: filled + size > capacity)
    runs = [[p.numel() for p in run] for run in found]
    assert [n for run in runs for n in run] == sizes[::-1]
    for run in runs:
        assert len(run) == 1 or sum(run) <= capacity
    for before, after in itertools.pairwise(runs):
        assert sum(before) + after[0] > capacity
