"""What several hosts make of a failure; pure functions."""

from __future__ import annotations

import dataclasses
from typing import Any

from ds_cli.local.failure import WorkerFailure
from ds_cli.multi_host.decision import Decision, Report, decide, unequal

HOSTS = {0: "host a (ranks 0 to 1 of 4)", 1: "host b (ranks 2 to 3 of 4)"}
ECHO = WorkerFailure(
    0, 10, 1, 1.0, "RuntimeError: Connection closed by peer", "Traceback of a\n", "a"
)
CAUSE = WorkerFailure(3, 30, 7, 99.0, "ValueError: bad", "Traceback of b\n", "b")


def judged(*reports: Report, **more: Any) -> Decision:
    return decide(reports, HOSTS, 4, **{"me": 0, "elastic": False, "used": 0, "most": 0, **more})


def test_reports_and_verdicts_travel_as_text() -> None:
    report = Report(1, "b", 1, (CAUSE,), 2, lost=(0,))
    assert Report.read(report.text()) == report
    decision = judged(report)
    assert Decision.read(decision.json()) == decision


def test_the_cause_wins_over_echoes_that_were_noticed_first_and_its_host_shows_it() -> None:
    decision = judged(Report(0, "a", 1, (ECHO,)), Report(1, "b", 2, (CAUSE,), ended=1))
    assert (decision.number, decision.code, decision.again) == (1, 7, False)
    assert decision.text.startswith(
        "Traceback of b\n\ndscore: rank 3 of 4 failed with exit code 7 first (pid 30 on b)"
    )
    assert "rank 0 too" in decision.text
    assert "Traceback of a" not in decision.text


def test_of_two_causes_the_first_alarm_wins_whatever_the_clocks_say() -> None:
    other = dataclasses.replace(CAUSE, rank=1, time=500.0, host="a")
    decision = judged(Report(0, "a", 1, (other,)), Report(1, "b", 2, (CAUSE,)))
    assert "rank 1 of 4" in decision.text
    assert decision.number == 0


def test_a_silent_host_is_the_cause_where_there_are_only_echoes() -> None:
    decision = judged(Report(0, "a", 1, (ECHO,)))
    assert (decision.number, decision.code) == (0, 1)
    assert decision.text.startswith("dscore: lost host b (ranks 2 to 3 of 4)")
    assert judged(Report(0, "a", 1, (dataclasses.replace(CAUSE, host="a"),))).code == 7
    assert judged(Report(0, "a", 1, lost=(1,)), Report(1, "b", 2, (CAUSE,))).text.startswith(
        "dscore: lost host b"
    )


def test_when_processes_are_started_again() -> None:
    both = Report(0, "a", 1, (ECHO,)), Report(1, "b", 2, (CAUSE,))
    assert not judged(*both).again
    decision = judged(*both, most=2, used=1)
    assert (decision.again, decision.used) == (True, 2)
    assert not judged(*both, most=2, used=2).again
    done = Report(0, "a", finished=True)
    assert not judged(done, both[1], most=2).again
    lost = both[:1]
    assert not judged(*lost, most=2).again
    decision = judged(*lost, elastic=True)
    assert (decision.again, decision.used) == (True, 0)  # a host that goes is no failure


def test_ranks_that_were_told_to_stop_are_no_failure_of_an_elastic_run() -> None:
    """Their host may have left already; no restart is counted."""
    told = Report(0, "a", 1, (dataclasses.replace(CAUSE, rank=0, code=75, error="", traceback=""),))
    decision = judged(told, elastic=True)
    assert (decision.again, decision.used, decision.code) == (True, 0, 75)
    decision = judged(told, Report(1, "b", 2, (ECHO,)), most=3)
    assert (decision.again, decision.code, decision.number) == (False, 75, 0)
    said = "exit code 75: a checkpoint was saved first, and the same command resumes from it"
    assert decision.text == f"dscore: rank 0 of 4 ended with {said}"


def test_machines_that_do_not_fit_are_named() -> None:
    def facts(host: str, problem: str = "", **versions: str) -> dict[str, Any]:
        return {"host": host, "problem": problem, "versions": {"torch": "2.8", **versions}}

    assert unequal([facts("a"), facts("b")]) == (0, "")
    number, said = unequal([facts("a"), facts("b"), facts("c", torch="2.7", x="1")])
    assert number == 2
    assert said.startswith(
        "host c has other versions: torch is 2.7, on a 2.8; x is 1, on a missing;"
    )
    assert unequal([facts("a"), facts("b", problem="no folder")]) == (1, "no folder")
