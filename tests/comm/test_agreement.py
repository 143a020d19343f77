"""Ranks that were started differently all stop, and all say how."""

from __future__ import annotations

import pytest
import torch
from ds_testing import run_ranks

from ds_core import comm
from ds_core.comm.agreement import SHOWN, describe_mismatch
from ds_core.errors import RankMismatchError


def mismatch(per_rank: list[dict[str, str]]) -> str:
    try:
        comm.check_ranks_agree(per_rank[comm.rank()])
    except RankMismatchError as error:
        return str(error)
    return ""


def test_equal_items_pass_in_any_order() -> None:
    assert run_ranks(2, mismatch, [{"a": "1", "b": "2"}, {"b": "2", "a": "1"}]) == ["", ""]


def test_every_rank_is_told_keys_values_and_holders() -> None:
    held = [
        {"dscore-zero": "0.1", "lr": "1"},
        {"dscore-zero": "0.2", "lr": "1"},
        {"dscore-zero": "0.1", "lr": "1"},
        {"lr": "1"},
    ]
    messages = run_ranks(4, mismatch, held)
    assert len(set(messages)) == 1
    assert "dscore-zero" in messages[0]
    assert "ranks 0, 2: 0.1" in messages[0]
    assert "rank 1: 0.2" in messages[0]
    assert "rank 3: (missing)" in messages[0]
    assert "lr" not in messages[0]


def test_long_lists_and_values_are_shortened() -> None:
    left = {f"key{i}": "x" * 1000 for i in range(SHOWN + 3)}
    right = dict.fromkeys(left, "y")
    message = describe_mismatch([left, right, right])
    assert "ranks 1, 2: y" in message
    assert "and 3 more: key5, key6, key7" in message
    assert "(1000 characters)" in message and "x" * 300 not in message


def calls_when_equal() -> list[str]:
    with torch.profiler.profile() as profile:
        comm.check_ranks_agree({"secret": "not sent"})
    return [e.key for e in profile.key_averages() if "c10d" in e.key or "gloo" in e.key]


def test_one_rank_exchanges_nothing() -> None:
    assert run_ranks(1, calls_when_equal) == [[]]
    assert all(run_ranks(2, calls_when_equal))  # the check does see calls


def test_without_a_process_group_it_passes() -> None:
    comm.check_ranks_agree({"a": "1"})


@pytest.mark.parametrize("size", [2])
def test_an_empty_mapping_agrees_with_itself_only(size: int) -> None:
    assert run_ranks(size, mismatch, [{}, {}]) == ["", ""]
    assert all("rank 0: (missing)" in m for m in run_ranks(size, mismatch, [{}, {"a": "1"}]))
