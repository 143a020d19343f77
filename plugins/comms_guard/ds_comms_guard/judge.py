"""The judge: one of the ranks that wait compares the positions of all, and tells what they say or
ends the job.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping

from ds_comms_guard.board import Board, Question
from ds_comms_guard.processes import Home, State
from ds_comms_guard.report import describe_waits
from ds_comms_guard.verdict import SHOWN, Position, prove
from ds_comms_guard.waits import Wait

log = logging.getLogger("ds_core.comm")

HEAR_ALL = 5.0
"""Seconds, at most, that a proof waits for more ranks to publish their positions."""

ANSWERS = 3
"""Looks in which ranks can answer a question, before others are asked about those that do not."""

JUDGE_LOST = 6
"""Looks in which a judge does not move until another rank takes its place."""


class Judge:
    """What this rank has found out as the judge, or would if it became it.

    patience, tick (between looks): seconds.

    proves: whether the job ends when positions prove that it cannot go on.
    """

    def __init__(self, board: Board, patience: float, tick: float, proves: bool) -> None:
        self._board = board
        self._rank = board.rank
        self._size = board.size
        self._patience = patience
        self._tick = tick
        self._proves = proves
        # rank -> (issued, beat) when the proof was first seen
        self._suspected: dict[int, tuple[int, int]] = {}
        self._proven = math.inf  # since when there has been a proof
        self._questions = 0
        self._wait: Wait | None = None
        self._due = 0.0  # seconds of the wait after which it is reported
        self._question = Question()  # asked before it is reported, about the silent too
        self._asked = self._searched = math.inf  # when that was, and when it was asked about them
        self._home = Home.here()

    def reset(self) -> None:
        """This rank goes on: what was suspected is void."""
        if self._wait is not None and self._due > self._patience:
            seconds = time.monotonic() - self._wait.since
            log.warning(
                "rank %d continues: it has waited %.3g s for %s",
                self._rank,
                seconds,
                self._wait.text,
            )
        self._suspected = {}
        self._wait = None

    def consider(self, wait: Wait) -> str | None:
        """Compare positions if this rank is the judge; the verdict when they prove that no rank can
        go on.

        wait: this rank's, whose position is published.
        """
        # Another wait than at the last look: its time starts again.
        if self._wait is None or (wait.since, wait.text) != (self._wait.since, self._wait.text):
            self._wait = wait
            self._due = self._patience
            self._asked = math.inf
        if not self._board.is_judge(JUDGE_LOST):
            return None
        positions = self._board.positions()
        if self._proves and (verdict := self._judge(positions)) is not None:
            return verdict
        self._tell(positions, time.monotonic() - wait.since)
        return None

    def _judge(self, found: Mapping[int, Position]) -> str | None:
        positions = {r: p for r, p in found.items() if p.wait is not None or p.queued or p.ended}
        proof = prove(found, self._size)
        if proof is None:
            self._suspected = {}
            self._proven = math.inf
            return None
        # Positions are read one after the other. What rests on who waits must still be so a while
        # later.
        beats = {r: (p.issued, p.beat) for r, p in positions.items() if r in proof.waiting}
        before, self._suspected = self._suspected, self._suspected or beats
        # A proof can wait a little for ranks that have not published yet, since the message shall
        # name them.
        self._proven = min(self._proven, time.monotonic())
        if len(positions) < self._size and time.monotonic() - self._proven < min(
            self._patience, HEAR_ALL
        ):
            return None
        # Either no later position can refute it, or all who wait have looked again since and issued
        # nothing.
        if proof.certain or (
            before
            and all(
                r in before and before[r][0] == i and before[r][1] < b
                for r, (i, b) in beats.items()
            )
        ):
            self._board.set_verdict(proof.text)
            return proof.text
        # A rank has moved on: start again with the suspicion that fits the new positions.
        if before and any(r not in before or before[r][0] != i for r, (i, _) in beats.items()):
            self._suspected = beats
        return None

    def _tell(self, found: Mapping[int, Position], waited: float) -> None:
        """Ask where all are when half the time has passed, and tell it in time; later once more."""
        now = time.monotonic()
        # First, at half time: ask every rank where it is.
        if self._asked == math.inf:
            if waited >= self._due - self._patience / 2:
                self._questions += 1
                self._question = Question(f"{self._rank}/{self._questions}")
                self._board.ask(self._question)
                self._asked = now
                self._searched = math.inf
            return
        heard = {
            r: p
            for r, p in found.items()
            if p.ended or p.heard == self._question.id or r == self._rank
        }
        silent = [r for r in range(self._size) if r not in heard][:SHOWN]
        # Then ask about those that have not answered: a rank on the same host can look at their
        # process.
        if silent and self._searched == math.inf and now - self._asked >= ANSWERS * self._tick:
            self._question = Question(self._question.id, self._board.homes(silent))
            self._searched = now
            self._board.ask(self._question)
        # Last, tell what is known. A rank that was found stopped or ended cannot answer any more,
        # so nothing is waited for; one that runs gets a quarter longer.
        states = self._states(silent)
        # Who runs may answer yet: while it makes other collectives it looks at the board now and
        # then only.
        settled = all(rank in states and states[rank].settled for rank in silent)
        # they are stopped or have ended: nothing more can be learnt
        sure = settled and bool(silent)
        if sure or waited >= self._due + (0 if settled else self._patience / 4):
            unanswered = {rank: self._silence(rank, states) for rank in silent}
            log.warning("%s", describe_waits(heard, unanswered, self._size, waited))
            self._due = 2 * waited
            self._asked = math.inf

    def _states(self, silent: list[int]) -> dict[int, State]:
        """What is known of silent ranks, by this rank for its own machine and by others for
        theirs."""
        here = {
            r: h.state()
            for r, h in self._question.silent.items()
            if h.machine == self._home.machine
        }
        said = self._board.states(self._question) | here
        return {rank: said[rank] for rank in silent if rank in said}

    def _silence(self, rank: int, states: Mapping[int, State]) -> str:
        home = self._question.silent.get(rank)
        if home is None:
            return (
                "does not answer, and has not said where it runs: it has not come to "
                "`initialize` "
                "yet, or has ended"
            )
        if rank in states:
            return f"({home}) {states[rank].text}"
        return (
            f"({home}) does not answer, nor does another rank there say why: the host or its "
            "link "
            "may be down"
        )
