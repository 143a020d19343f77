"""Plans of steps: every sample once, nothing over the budget, and little left empty."""

from __future__ import annotations

from collections.abc import Callable

from ds_data_sampling.batching.batches import (
    Feed,
    Plan,
    TokenBudget,
    by_length,
    by_tokens,
    fixed,
    packed,
    samples_in,
)
from ds_data_sampling.batching.mixing import Mixed, shares
from ds_data_sampling.batching.order import Shuffled
from hypothesis import given, settings
from hypothesis import strategies as st

Planned = Callable[[Feed, int], list[Plan]]
lengths_of = st.lists(st.integers(1, 30), min_size=1, max_size=120)


def epoch(size: int, plan: Planned, *, drop_last: bool = False) -> list[Plan]:
    """The steps of one epoch."""

    def again() -> Shuffled:
        order = Shuffled(size, 1)
        order.start(0)
        return order

    feed = Feed(again(), again=None if drop_last else again)
    steps = []
    while feed.more(len(steps)) and (plans := plan(feed, len(steps))):
        steps += plans
    return steps


def indices(steps: list[Plan]) -> list[int]:
    return [index for plan in steps for micro in plan for index in samples_in(micro)]


def check_whole(steps: list[Plan], size: int, micros: int, slots: int) -> None:
    """Each sample comes; one comes twice only to fill up the last step, of which `slots` may not be
    empty.
    """
    assert all(len(plan) == micros and all(plan) for plan in steps)
    seen = indices(steps)
    assert set(seen) == set(range(size))
    assert len(seen) - size < slots


@given(st.integers(1, 90), st.integers(1, 5), st.integers(1, 5), st.booleans())
@settings(deadline=None, max_examples=40)
def test_fixed(size: int, micros: int, samples: int, drop_last: bool) -> None:
    steps = epoch(size, lambda feed, step: fixed(feed, step, micros, samples), drop_last=drop_last)
    assert all(len(micro) == samples for plan in steps for micro in plan)
    if drop_last:
        assert (
            len(indices(steps))
            == len(set(indices(steps)))
            == size // (micros * samples) * micros * samples
        )
    else:
        check_whole(steps, size, micros, micros * samples)


@given(lengths_of, st.integers(1, 4), st.integers(1, 3), st.one_of(st.none(), st.integers(3, 5)))
@settings(deadline=None, max_examples=40)
def test_by_tokens(lengths: list[int], micros: int, fewest: int, most: int | None) -> None:
    budget = TokenBudget(90, fewest, most)
    steps = epoch(
        len(lengths), lambda feed, step: by_tokens(feed, step, micros, lengths.__getitem__, budget)
    )
    check_whole(steps, len(lengths), micros, micros)
    for plan in steps:
        for micro in plan:
            assert max(lengths[i] for i in micro) * len(micro) <= 90
            assert most is None or len(micro) <= most
    assert all(len(micro) >= fewest for plan in steps[:-1] for micro in plan)


@given(lengths_of, st.integers(1, 4), st.integers(1, 4), st.booleans())
@settings(deadline=None, max_examples=40)
def test_by_length(lengths: list[int], micros: int, window: int, drop_last: bool) -> None:
    budget = TokenBudget(90)

    def plan(feed: Feed, step: int) -> list[Plan]:
        return by_length(feed, step, micros, lengths.__getitem__, budget, steps=window, seed=2)

    steps = epoch(len(lengths), plan, drop_last=drop_last)
    if not drop_last:
        check_whole(steps, len(lengths), micros, micros)
    assert len(indices(steps)) <= len(lengths) + micros
    assert all(
        max(lengths[i] for i in micro) * len(micro) <= 90 for plan in steps for micro in plan
    )


@given(lengths_of, st.integers(1, 3), st.integers(1, 3))
@settings(deadline=None, max_examples=40)
def test_packed(lengths: list[int], micros: int, rows: int) -> None:
    steps = epoch(
        len(lengths), lambda feed, step: packed(feed, step, micros, rows, 40, lengths.__getitem__)
    )
    assert all(len(micro) == rows and all(micro) for plan in steps for micro in plan)
    check_whole(steps, len(lengths), micros, micros * rows)
    assert all(
        sum(lengths[i] for i in row) <= 40 for plan in steps for micro in plan for row in micro
    )


def test_rows_and_batches_are_well_filled() -> None:
    """What the ways of planning leave empty, of samples of 8 to 512 tokens."""
    import numpy as np

    lengths = np.random.default_rng(0).lognormal(4.2, 0.8, 4000).clip(8, 512).astype(int).tolist()
    used = sum(lengths)
    budget = TokenBudget(4096)

    def padded(steps: list[Plan]) -> int:
        return sum(max(lengths[i] for i in micro) * len(micro) for plan in steps for micro in plan)

    plain = epoch(4000, lambda feed, step: fixed(feed, step, 4, 16))
    tokens = epoch(4000, lambda feed, step: by_tokens(feed, step, 4, lengths.__getitem__, budget))
    alike = epoch(
        4000, lambda feed, step: by_length(feed, step, 4, lengths.__getitem__, budget, steps=8)
    )
    rows = epoch(4000, lambda feed, step: packed(feed, step, 4, 4, 1024, lengths.__getitem__))
    shown = [
        used / padded(plain),
        used / padded(tokens),
        used / padded(alike),
        used / (len(rows) * 4 * 4 * 1024),
    ]
    assert shown[0] < 0.5 and shown[2] > 0.9 and shown[3] > 0.95, shown


@given(st.lists(st.integers(1, 40), min_size=1, max_size=4), st.integers(1, 100), st.data())
@settings(deadline=None, max_examples=40)
def test_mixed(sizes: list[int], total: int, data: st.DataObject) -> None:
    """The shares of each epoch, evenly spread; no sample of a set comes again before all others
    have come.
    """
    weights = [data.draw(st.integers(1, 5)) for _ in sizes]
    order = Mixed(sizes, weights, total, seed=4)
    wanted = shares(total, weights)  # type: ignore[var-annotated]
    walked = [[] for _ in sizes]  # type: ignore[var-annotated]
    for number in range(3):
        order.start(number)
        found = order.take(total // 2, 0)
        other = Mixed(sizes, weights, total, seed=4)
        other.load_state_dict(order.state_dict())
        found += order.take(total, 0)
        assert found[total // 2 :] == other.take(total, 0) and len(found) == total
        first = 0
        for part, size in enumerate(sizes):
            mine = [i - first for i in found if first <= i < first + size]
            assert len(mine) == wanted[part]
            half = sum(first <= i < first + size for i in found[: total // 2])
            assert abs(half - wanted[part] / 2) <= 2
            walked[part] += mine
            first += size
    for size, walk in zip(sizes, walked, strict=True):
        for begin in range(0, len(walk), size):
            one = walk[begin : begin + size]
            assert len(set(one)) == len(one)
