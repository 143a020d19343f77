"""The board: what ranks tell each other through the job's store when somebody waits; asked nothing before."""

from __future__ import annotations

import json
from typing import Any

from ds_comms_guard.verdict import Position

__all__ = ["Board"]


class Board:
    """Keys of a store of torch.distributed. Every method but `answer` may raise RuntimeError: rank 0, which keeps the
    store, has ended.

    ``position/N``: where a rank stands that waits or has ended ("": no longer); ``published``: how many N there are.
    ``judge``: the rank that compares positions. ``verdict``: what it proved, which ends the job.
    ``asking``: the call that the judge asks about, of ranks that do not wait; ``busy/RANK``: a rank's answer.
    """

    def __init__(self, store: Any, rank: int) -> None:
        self._store, self._rank = store, rank
        self._key = ""  # under which this rank's position is published

    @property
    def published(self) -> bool:
        """Whether this rank's position is there."""
        return self._key != ""

    def publish(self, position: Position) -> None:
        """Put this rank's position in the place of its last one."""
        if not self._key:
            self._key = f"position/{self._store.add('published', 1)}"
        self._store.set(self._key, json.dumps(position.as_json()))

    def withdraw(self) -> None:
        """Take this rank's position away: it goes on. It is no longer the judge."""
        self._store.set(self._key, "")
        self._key = ""
        self._store.compare_set("judge", str(self._rank), "")

    def positions(self) -> list[Position]:
        """Of all ranks that wait or have ended, read one after the other."""
        count = self._store.add("published", 0)
        keys = [f"position/{i}" for i in range(1, count + 1)]
        texts = [self._store.get(key).decode() for key in keys if self._store.check([key])]
        return [Position.from_json(json.loads(text)) for text in texts if text]

    def is_judge(self) -> bool:
        """Whether this rank is the judge; it becomes it if no rank is."""
        me = str(self._rank)
        return bool(self._store.compare_set("judge", "", me).decode() == me)

    def verdict(self) -> str | None:
        """What was proved."""
        return self._read("verdict")

    def set_verdict(self, text: str) -> None:
        """All ranks end with this message."""
        self._store.set("verdict", text)

    def ask(self, about: str) -> None:
        """Ask ranks that do not wait where they are."""
        self._store.set("asking", about)

    def question(self) -> str:
        """What is asked; "" for nothing."""
        return self._read("asking") or ""

    def answer(self, about: str, where: str) -> None:
        """Answer the question `about`."""
        self._store.set(f"busy/{self._rank}", f"{about}\n{where}")

    def answer_of(self, rank: int, about: str) -> str:
        """Another rank's answer to the question `about`; "" while there is none."""
        asked, _, where = (self._read(f"busy/{rank}") or "").partition("\n")
        return where if asked == about else ""

    def _read(self, key: str) -> str | None:
        return self._store.get(key).decode() if self._store.check([key]) else None
