"""Messages among some of a group's ranks, over gloo and with tags of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from ds_comm_gloo import gloo
from ds_comm_gloo.group_queue import GroupQueue
from ds_core.errors import LostRankError

_TAGS = 0x44530010  # beside those of `ds_comm_gloo.gloo`


class Lane:
    """Kinds of messages, in a tag's lowest three bits.

    Those of one kind and pair of ranks are matched in the order of blocks, in which both ends post
    them; those of different kinds may overtake each other.
    """

    SCATTER, GATHER, TOTAL, SPREAD, CARRIED, EXCHANGED, RECORDS = range(1, 8)


def wire_tag(tag: int, lane: int) -> int:
    """The tag of messages on `lane` in a collective with `tag` (0: none)."""
    return tag | lane if tag else _TAGS + lane


class PeerWork:
    """A message under way, whose error says who is at its other end."""

    def __init__(self, work: Any, what: str) -> None:
        self._work = work
        self._what = what

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until it has been sent or received. Raises LostRankError."""
        try:
            self._work.wait() if timeout is None else self._work.wait(timeout)
        except RuntimeError as error:
            raise LostRankError(
                f"{self._what} failed. {(str(error).strip().splitlines() or [''])[0]}"
            ) from error
        return True


class SomeRanks:
    """Collectives among `ranks` of a group, this one with them; their parts may differ in length.

    names: by number in the group, what to call the ranks.
    """

    def __init__(self, queue: GroupQueue, ranks: Sequence[int], names: Mapping[int, str]) -> None:
        self._queue = queue
        self.ranks = tuple(ranks)
        self._names = names
        self.size = len(self.ranks)
        self.rank = self.ranks.index(queue.rank)

    def peers(self) -> list[int]:
        """The others, as places in `ranks`, beginning with the right neighbour."""
        return [(self.rank + d) % self.size for d in range(1, self.size)]

    def send(self, tensor: Tensor, to: int, tag: int) -> list[PeerWork]:
        """Start sending to the rank at place `to`; nothing when there is nothing to send."""
        return (
            [self._name(self._queue.send(tensor, self.ranks[to], tag), to, "to")]
            if len(tensor)
            else []
        )

    def receive(self, tensor: Tensor, source: int, tag: int) -> list[PeerWork]:
        """Start receiving from the rank at place `source`."""
        return (
            [self._name(self._queue.recv(tensor, self.ranks[source], tag), source, "from")]
            if len(tensor)
            else []
        )

    def scatter(self, rows: Sequence[Tensor], parts: Sequence[Tensor], tag: int) -> list[PeerWork]:
        """Start filling ``rows[i]`` with what rank i has as this one's part; not this rank's own
        row.
        """
        tag = wire_tag(tag, Lane.SCATTER)
        works = [work for i in self.peers() for work in self.receive(rows[i], i, tag)]
        return works + [work for i in self.peers() for work in self.send(parts[i], i, tag)]

    def gather(
        self, parts: Sequence[Tensor], mine: Tensor, tag: int, lane: int = Lane.GATHER
    ) -> list[PeerWork]:
        """Start filling ``parts[i]`` with rank i's `mine`; not this rank's own part."""
        tag = wire_tag(tag, lane)
        works = [work for i in self.peers() for work in self.receive(parts[i], i, tag)]
        return works + [work for i in self.peers() for work in self.send(mine, i, tag)]

    def _name(self, work: Any, place: int, way: str) -> PeerWork:
        me = self._names[self._queue.rank]
        other = self._names[self.ranks[place]]
        return PeerWork(work, f"{me}: a message {way} {other}")

    # -- as a transport does, blocking -------------------------------------------------------------

    def reduce_scatter(self, output: Tensor, parts: Sequence[Tensor], op: str, tag: int) -> None:
        """See `Transport`."""
        rows = [parts[i] if i == self.rank else torch.empty_like(output) for i in range(self.size)]
        for work in self.scatter(rows, parts, tag):
            work.wait()
        if len(output):
            gloo.reduce_parts(output, rows, getattr(ReduceOp, op))

    def all_gather(self, parts: Sequence[Tensor], mine: Tensor, tag: int) -> None:
        """See `Transport`."""
        works = self.gather(parts, mine, tag)
        if parts[self.rank].data_ptr() != mine.data_ptr():
            gloo.copy(parts[self.rank], mine)
        for work in works:
            work.wait()
