"""Who computes which matrix."""

from __future__ import annotations

import random

import pytest
from ds_optimizer_kit import deal


def loads(costs: list[float], owners: list[int], world: int) -> list[float]:
    found = [0.0] * world
    for cost, owner in zip(costs, owners, strict=True):
        found[owner] += cost
    return found


def test_a_rank_keeps_what_it_has() -> None:
    assert deal([4.0, 4.0, 4.0, 4.0], [[1], [0], [1], [0]], 2) == [1, 0, 1, 0]


def test_a_rank_with_too_much_gives_some_away() -> None:
    owners = deal([4.0] * 4, [[0]] * 4, 2)
    assert sorted(owners) == [0, 0, 1, 1]


def test_what_is_cut_goes_to_who_has_least() -> None:
    owners = deal([9.0, 5.0, 4.0], [[], [], []], 2)
    assert loads([9.0, 5.0, 4.0], owners, 2) == [9.0, 9.0]


@pytest.mark.parametrize("held", [0.0, 0.5, 1.0])
def test_shares_of_4096_ranks_differ_by_5_percent_at_most(held: float) -> None:
    world = 4096
    rng = random.Random(7)
    # A model with 64 experts in each of 96 layers of three widths, and attention beside them.
    costs = []
    for layer in range(96):
        width = (1024, 1536, 2048)[layer % 3]
        costs += [width * width * 512.0] * 3 * 256 + [float(width) ** 3] * 4
    holders = [[rng.randrange(world)] if rng.random() < held else [] for _ in costs]
    found = loads(costs, deal(costs, holders, world), world)
    assert max(found) <= 1.05 * sum(found) / world
    assert min(found) >= 0.95 * sum(found) / world


def test_no_rank_has_more_than_a_share_and_one_matrix() -> None:
    rng = random.Random(1)
    for _ in range(50):
        world = rng.randrange(1, 9)
        costs = [rng.expovariate(1.0) for _ in range(rng.randrange(1, 30))]
        holders = [rng.sample(range(world), rng.randrange(world + 1)) for _ in costs]
        found = loads(costs, deal(costs, holders, world), world)
        assert max(found) <= sum(costs) / world + max(costs) + 1e-9
