"""Which of several ends is shown as the cause, from what was seen and what the processes left."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from ds_cli.local.failure import describe, exit_code, first, gather, signal_name
from ds_cli.local.process_monitor import Ending, Started


def started(rank: int, attempt: int = 0) -> Started:
    return Started(attempt, rank, rank, 100 + rank, 100 + rank)


def word(folder: Path, rank: int, time: float, error: str, code: int = 1) -> None:
    facts = {"time": time, "code": code, "error": error, "traceback": f"TRACE {error}\n"}
    (folder / f"0-{rank}.error").write_text(json.dumps(facts))


def test_the_earliest_end_is_the_cause_and_a_crash_needs_no_word(tmp_path: Path) -> None:
    word(tmp_path, 0, 5.2, "RuntimeError: Connection reset by peer")
    endings = {
        started(0): Ending(1, 5.3),
        started(1): Ending(-9, 5.1),
        started(2): Ending(-15, 6.0),
    }
    failures, ended = gather(tmp_path, 0, endings)
    assert [f.rank for f in failures] == [1, 0]
    assert ended == 1
    assert exit_code(first(failures)) == 137
    text = describe(failures, ended, 3)
    assert "TRACE" not in text
    assert "rank 1 of 3 was killed by SIGKILL (signal 9) first" in text
    assert "ran out of memory" in text
    assert "rank 0 too: RuntimeError: Connection reset by peer" in text


@pytest.mark.parametrize(
    "echo",
    [
        "RuntimeError: gloo: Connection closed by peer [::1]:1",
        "ds_core.errors.LostRankError: rank 1 has ended",
    ],
)
def test_an_echo_of_a_lost_peer_gives_way_to_the_cause(tmp_path: Path, echo: str) -> None:
    word(tmp_path, 0, 5.0, echo)
    word(tmp_path, 1, 5.4, "KeyError: 'x'")
    # rank 1 was still shutting down when torch ended it
    failures, ended = gather(
        tmp_path, 0, {started(0): Ending(1, 5.1), started(1): Ending(-15, 5.5)}
    )
    assert (first(failures).rank, exit_code(first(failures)), ended) == (1, 1, 0)
    head = "TRACE KeyError: 'x'\n\ndscore: rank 1 of 2 failed with exit code 1 first (pid 101 on "
    assert describe(failures, ended, 2).startswith(head)


def test_a_kill_that_was_noticed_late_is_the_cause(tmp_path: Path) -> None:
    """A killed process with much memory is gone for its peers before it is for its parent."""
    word(tmp_path, 0, 5.0, "RuntimeError: gloo: Connection reset by peer")
    endings = {
        started(0): Ending(1, 5.1),
        started(1): Ending(-9, 5.3),
        started(2): Ending(-9, 10.2),
    }
    failures, ended = gather(tmp_path, 0, endings, grace=5.0)
    # the launcher killed rank 2
    assert ([f.rank for f in failures], first(failures).rank, ended) == ([0, 1], 1, 1)


def test_an_echo_alone_is_shown(tmp_path: Path) -> None:
    word(tmp_path, 0, 5.0, "RuntimeError: Connection closed by peer")
    failures, ended = gather(
        tmp_path, 0, {started(0): Ending(1, 5.1), started(1): Ending(-15, 5.5)}
    )
    assert (first(failures).rank, ended) == (0, 1)


def test_what_only_torch_saw_counts_too_and_other_attempts_do_not(tmp_path: Path) -> None:
    endings = {started(0, attempt=0): Ending(3, 1.0), started(1, attempt=1): Ending(-15, 2.0)}
    failures, ended = gather(tmp_path, 1, endings, [(0, 0, 100, 4), (1, 1, 101, -15)])
    assert [(f.rank, f.code) for f in failures] == [(1, -15), (0, 4)]
    assert ended == 0


def test_a_word_that_cannot_be_read_is_no_word(tmp_path: Path) -> None:
    (tmp_path / "0-0.error").write_text('{"time": 1')
    failures, _ = gather(tmp_path, 0, {started(0): Ending(1, 1.0)})
    assert (failures[0].error, failures[0].traceback) == ("", "")


def test_signals_have_names() -> None:
    assert signal_name(signal.SIGSEGV) == "SIGSEGV"
    assert signal_name(99) == "signal 99"
