"""Groups that are split by what parameters are: the same kinds on all ranks."""

from __future__ import annotations

from typing import Any

from ds_testing import run_ranks


def split_on_a_rank() -> list[Any]:
    """Rank 0 has even numbers in the first group, rank 1 odd ones; the second is alike on both."""
    from ds_optimizer_kit import split_alike

    from ds_core import comm

    def split(groups: Any) -> list[dict[str, Any]]:
        kinds = {n % 2 for n in groups[0]["params"]}
        return [
            {**group, "params": [n for n in group["params"] if n % 2 == odd], "odd": odd}
            for group in groups
            for odd in sorted(kinds)
        ]

    first = {"params": [comm.rank(), comm.rank() + 2], "lr": 0.5}
    second = {"params": [1, 3], "lr": 0.25}
    found = split_alike([first, second], split, ("odd",), lambda kind: kind)
    return [[group["params"], group["odd"], group["lr"]] for group in found]


def test_a_rank_without_a_kind_has_an_empty_group_of_it() -> None:
    assert run_ranks(2, split_on_a_rank) == [
        [[[0, 2], 0, 0.5], [[], 1, 0.5], [[1, 3], 1, 0.25]],
        [[[], 0, 0.5], [[1, 3], 1, 0.5], [[1, 3], 1, 0.25]],
    ]
