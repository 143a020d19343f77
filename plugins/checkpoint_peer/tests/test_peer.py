"""A run that is started again goes on from memory, exactly; from disk where memory cannot be used."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import pytest
from peer_lives import MODES, first_life, rooms, second_life

TWO = [0, 1]
SLOW = {"fp32", "bf16", "stage 1", "stage 2 offload", "stage 3 local"}


@pytest.mark.parametrize(
    "mode", [pytest.param(m, marks=pytest.mark.slow) if m in SLOW else m for m in MODES]
)
def test_resume_from_memory_is_exact_when_a_host_is_lost(
    ranks: Any, tmp_path: Path, mode: str
) -> None:
    folder = str(tmp_path)
    disk = "local" not in mode  # all hosts of this test see one disk
    before = ranks(2, first_life, folder, mode, TWO, disk, {})
    assert len(rooms(folder)) == 2
    # The second host and its memory are gone; another takes its place, which sees none of it.
    after = ranks(2, second_life, folder, mode, [0, 2], {})
    for (losses, state, said), (where, client, again, state_again, _) in zip(
        before, after, strict=True
    ):
        assert not said
        assert where == ["memory", 3] and client == ({"epoch": 7} if disk else {})
        assert losses == again and state == state_again


def test_another_number_of_ranks(ranks: Any, tmp_path: Path) -> None:
    folder = str(tmp_path)
    ranks(2, first_life, folder, "stage 3", TWO, False, {})
    [(where, _, losses, *_)] = ranks(1, second_life, folder, "stage 3", [0], {})
    assert where == ["memory", 3] and len(losses) == 2


def test_nothing_is_left_after_the_end(ranks: Any, tmp_path: Path) -> None:
    folder = str(tmp_path)
    ranks(2, first_life, folder, "fp32", TWO, False, {})
    ranks(2, second_life, folder, "fp32", TWO, {})
    assert rooms(folder) == []
