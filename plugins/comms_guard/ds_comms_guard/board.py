"""The board: what ranks tell each other through the job's store when somebody waits."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ds_comms_guard.processes import Home, State
from ds_comms_guard.verdict import Position


@dataclass(frozen=True, slots=True)
class Question:
    """Asks the other ranks where they are.

    id: of this question.
    silent: ranks that have not answered it, and their processes.
    """

    id: str = ""
    silent: Mapping[int, Home] = field(default_factory=dict)


class Board:
    """Keys of a store of torch.distributed.

    open: connects to the store; called at the first use, once.

    Every method may raise RuntimeError: who keeps the store has ended. It may also block, if that
    process is stopped.

    ``home/R``: the process of rank R. ``position/R``: where it stands, if it waits, was asked or
    has ended.
    ``judge``: the rank that compares positions, and a count that shows that it lives. ``verdict``:
        what it proved, which ends the job. ``question``: of the judge, to all. ``state/R``: what a
        rank on R's machine says of a silent R.
    """

    def __init__(self, open: Callable[[], Any], rank: int, size: int) -> None:
        self._open = open
        self.rank = rank
        self.size = size
        self._opened: Any = None
        # the judge's key as last seen, and for how many looks it was the same
        self._lease = ""
        self._count = 0

    @property
    def _store(self) -> Any:
        if self._opened is None:
            self._opened = self._open()
        return self._opened

    def introduce(self, home: Home) -> None:
        """Say which process this rank is, while it can."""
        self._store.set(f"home/{self.rank}", json.dumps(home))

    def homes(self, ranks: Iterable[int]) -> dict[int, Home]:
        """Which processes other ranks are, as far as they have said."""
        texts = {rank: self._read(f"home/{rank}") for rank in ranks}
        return {rank: Home.read(json.loads(text)) for rank, text in texts.items() if text}

    def publish(self, position: Position) -> None:
        """Put this rank's position in the place of its last one."""
        self._store.set(f"position/{self.rank}", json.dumps(position.as_json()))

    def resign(self) -> None:
        """This rank goes on, so it is no longer the judge."""
        if self._lease.startswith(f"{self.rank} "):
            self._store.compare_set("judge", self._lease, "")
        self._lease = ""
        self._count = 0

    def positions(self) -> dict[int, Position]:
        """Of all ranks that wait, were asked or have ended, read one after the other."""
        texts = {rank: self._read(f"position/{rank}") for rank in range(self.size)}
        return {rank: Position.from_json(json.loads(text)) for rank, text in texts.items() if text}

    def is_judge(self, patient: int) -> bool:
        """Whether this rank is the judge; it becomes it if no rank is, or that one has not moved
        for `patient` looks.

        A judge asks again and again, which shows that it lives.
        """
        mine = f"{self.rank} "
        expected = self._lease
        if not expected.startswith(mine) and self._count < patient:
            expected = ""
        beat = int(expected.split()[1]) + 1 if expected.startswith(mine) else 0
        found: str = self._store.compare_set("judge", expected, f"{mine}{beat}").decode()
        self._count = self._count + 1 if found == self._lease else 0
        self._lease = found
        return found.startswith(mine)

    def verdict(self) -> str | None:
        """What was proved."""
        return self._read("verdict")

    def set_verdict(self, text: str) -> None:
        """All ranks end with this message."""
        self._store.set("verdict", text)

    def ask(self, question: Question) -> None:
        """Ask all ranks where they are, and those on the machine of a silent one what became of
        it."""
        self._store.set("question", json.dumps([question.id, dict(question.silent)]))

    def question(self) -> Question:
        """What was asked last."""
        text = self._read("question")
        if not text:
            return Question()
        asked, silent = json.loads(text)
        return Question(asked, {int(rank): Home.read(fields) for rank, fields in silent.items()})

    def tell_state(self, rank: int, question: Question, state: State) -> None:
        """Say what became of a silent rank on this machine."""
        self._store.set(f"state/{rank}", json.dumps([question.id, *state]))

    def states(self, question: Question) -> dict[int, State]:
        """What others have said of silent ranks."""
        said = {
            rank: json.loads(self._read(f"state/{rank}") or "[0, 0, 0]") for rank in question.silent
        }
        return {
            rank: State(text, settled)
            for rank, (asked, text, settled) in said.items()
            if asked == question.id
        }

    def _read(self, key: str) -> str | None:
        return self._store.get(key).decode() if self._store.check([key]) else None
