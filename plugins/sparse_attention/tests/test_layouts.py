"""Layouts against drawings made by hand, and their properties."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ds_sparse_attention import SparseAttentionConfig, make_layout
from pydantic import ValidationError


def drawn(rows: int = 6, heads: int = 1, head: int = 0, **keys: Any) -> list[str]:
    layout = make_layout(SparseAttentionConfig.model_validate(keys), heads, rows)
    return ["".join("#" if seen else "." for seen in row) for row in layout[head].tolist()]


CASES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "dense": ({"mode": "dense"}, ["######"] * 6),
    "dense, causal": (
        {"mode": "dense", "attention": "unidirectional"},
        ["#.....", "##....", "###...", "####..", "#####.", "######"],
    ),
    "fixed": (
        {"num_local_blocks": 4},  # global: block 3; of the short last window the last block
        ["####.#", "####.#", "####.#", "####.#", "...###", "...###"],
    ),
    "fixed, horizontal": (
        {"num_local_blocks": 2, "horizontal_global_attention": True},
        ["##.#.#", "######", ".###.#", "######", ".#.###", "######"],
    ),
    "fixed, causal": (
        {"num_local_blocks": 2, "attention": "unidirectional"},
        ["#.....", "##....", ".##...", ".###..", ".#.##.", ".#.###"],
    ),
    "variable": (
        {"mode": "variable", "local_window_blocks": [1, 2], "global_block_indices": [5]},
        ["#....#", ".##..#", ".##..#", "...###", "...###", ".....#"],
    ),
    "variable, ranges": (
        {
            "mode": "variable",
            "local_window_blocks": [1],
            "global_block_indices": [1],
            "global_block_end_indices": [3],
            "horizontal_global_attention": True,
        },
        ["###...", "######", "######", ".###..", ".##.#.", ".##..#"],
    ),
    "bigbird": (
        {"mode": "bigbird", "num_sliding_window_blocks": 3},
        ["######", "###...", "####..", "#.###.", "#..###", "#...##"],
    ),
    "bigbird, causal": (
        {"mode": "bigbird", "num_sliding_window_blocks": 3, "attention": "unidirectional"},
        ["#.....", "##....", "###...", "#.##..", "#..##.", "#...##"],
    ),
    "bslongformer": (
        {"mode": "bslongformer", "num_sliding_window_blocks": 1, "global_block_indices": [2]},
        ["#.#...", ".##...", "######", "..##..", "..#.#.", "..#..#"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_layout_is_as_it_was_drawn(case: str) -> None:
    keys, rows = CASES[case]
    assert drawn(**keys) == rows


def test_heads_have_global_blocks_in_turn() -> None:
    keys = {
        "num_local_blocks": 2,
        "different_layout_per_head": True,
        "num_different_global_patterns": 2,
    }
    assert drawn(4, 3, 0, **keys) == ["##.#", "##.#", ".###", ".###"]
    assert drawn(4, 3, 1, **keys) == ["###.", "###.", "#.##", "#.##"]
    assert drawn(4, 3, 2, **keys) == drawn(4, 3, 0, **keys)


@pytest.mark.parametrize("attention", ["bidirectional", "unidirectional"])
@pytest.mark.parametrize("mode", ["variable", "bigbird"])
def test_random_blocks_are_as_many_as_asked_and_the_same_each_time(
    mode: str, attention: str
) -> None:
    keys = {"mode": mode, "attention": attention, "different_layout_per_head": True}
    few = {"local_window_blocks": [1], "global_block_indices": [0], "num_sliding_window_blocks": 1}
    none, two = (
        make_layout(
            SparseAttentionConfig.model_validate({**keys, **few, "num_random_blocks": n}), 4, 32
        )
        for n in (0, 2)
    )
    again = make_layout(
        SparseAttentionConfig.model_validate({**keys, **few, "num_random_blocks": 2}), 4, 32
    )
    assert torch.equal(two, again) and not torch.equal(two[0], two[1])
    more = (two.int() - none.int()).sum(-1)
    assert (more >= 0).all() and more.max() == 2 and more.float().mean() > 1.2
    if attention == "unidirectional":
        assert not two.triu(1).any()


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"mode": "sparse"}, "mode"),
        ({"num_local_blocks": 4, "num_global_blocks": 3}, "multiple of num_global_blocks"),
        ({"num_different_global_patterns": 2}, "different_layout_per_head"),
        ({"num_different_global_patterns": 5, "different_layout_per_head": True}, "4 places"),
        ({"horizontal_global_attention": True, "attention": "unidirectional"}, "bidirectional"),
        ({"mode": "variable", "local_window_blocks": [4, 0]}, "below 1"),
        ({"mode": "variable", "global_block_indices": [-1]}, "negative"),
        ({"mode": "bslongformer", "global_block_end_indices": [1, 2]}, "2 numbers"),
        (
            {"mode": "bslongformer", "global_block_indices": [2], "global_block_end_indices": [2]},
            "larger",
        ),
    ],
)
def test_what_does_not_go_together_is_an_error(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        SparseAttentionConfig.model_validate(keys)


def test_keys_of_other_modes_are_remarked() -> None:
    given = {"mode": "bigbird", "local_window_blocks": [4], "num_random_blocks": 1}
    config = SparseAttentionConfig.model_validate(given)
    assert dict(config.remarks(given)) == {"local_window_blocks": "has no effect with mode bigbird"}
