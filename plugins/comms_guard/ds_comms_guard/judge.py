"""The judge: one of the ranks that wait compares the positions of all, until they prove something."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence

from ds_comms_guard.board import Board
from ds_comms_guard.ledger import Call
from ds_comms_guard.verdict import SHOWN, Position, prove

__all__ = ["ASK_EVERY", "Judge"]

log = logging.getLogger("ds_core.comm")

HEAR_ALL = 5.0
"""Seconds, at most, that a proof waits for more ranks to publish their positions."""

ASK_EVERY = 5.0
"""Seconds between questions of a rank that does not wait: have the others given up, or do they ask where it is?"""


class Judge:
    """What this rank has found out as the judge, or would if it became it. patience: seconds; size: of the job."""

    def __init__(self, board: Board, rank: int, size: int, patience: float) -> None:
        self._board, self._rank, self._size, self._patience = board, rank, size, patience
        self._suspected: dict[int, tuple[int, int]] = {}  # rank -> (issued, beat) when the proof was first seen
        self._proven = math.inf  # since when there has been a proof
        self._asking: tuple[str, float] = ("", 0.0)  # the question, and since when; inf: it was answered

    def reset(self) -> None:
        """This rank goes on: what was suspected is void."""
        self._suspected = {}

    def consider(self, call: Call) -> str | None:
        """Compare positions if this rank is the judge; the verdict when they prove that no rank can go on.

        call: what this rank waits for.
        """
        if not self._board.is_judge():
            return None
        positions = self._board.positions()
        proof = prove({p.rank: p for p in positions}, self._size)
        if proof is None:
            self._suspected, self._proven = {}, math.inf
            self._ask(call, positions)
            return None
        # Positions are read one after the other. What rests on who waits must still be so a while later.
        beats = {p.rank: (p.issued, p.beat) for p in positions if p.rank in proof.waiting}
        before, self._suspected = self._suspected, self._suspected or beats
        # A proof can wait a little for ranks that have not published yet, since the message shall name them.
        self._proven = min(self._proven, time.monotonic())
        if len(positions) < self._size and time.monotonic() - self._proven < min(self._patience, HEAR_ALL):
            return None
        if proof.certain or (
            before and all(r in before and before[r][0] == i and before[r][1] < b for r, (i, b) in beats.items())
        ):
            self._board.set_verdict(proof.text)
            return proof.text
        if before and any(r not in before or before[r][0] != i for r, (i, _) in beats.items()):
            self._suspected = beats
        return None

    def _ask(self, call: Call, positions: Sequence[Position]) -> None:
        """Log, once per wait, where the ranks are that do not wait: all that can be said when nothing is proven."""
        about, now = "/".join(map(str, call.place)), time.monotonic()
        if self._asking[0] != about:
            self._asking = (about, now)
            self._board.ask(about)
        there = {p.rank for p in positions}
        busy = [rank for rank in range(self._size) if rank not in there][:SHOWN]
        answers = {rank: self._board.answer_of(rank, about) for rank in busy}
        late = now - self._asking[1] > 2 * ASK_EVERY
        if self._asking[1] < math.inf and (late or all(answers.values())):
            self._asking = (about, math.inf)
            silent = "does not answer: its process is gone, or runs something that stops all its threads"
            who = "; ".join(f"rank {rank} {where or silent}" for rank, where in answers.items())
            log.warning("rank %d still waits for %s: %s", self._rank, call.describe(), who)
