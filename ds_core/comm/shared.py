"""Collectives of a group by another way than its backend, where one is installed: the ``collectives`` kernel.

The kernel is a function ``(Meeting) -> Transport | None``, called once per group by all its ranks together; the answer
must be of one kind on all of them. The reference, `backend_only`, says None: the backend does everything. A transport
runs one collective at a time, on the group's lane, so that their order is that of the calls on every rank.

[Note: when ranks meet] A meeting blocks until the group's ranks are all there. An asynchronous collective must not: a
rank may first have to launch one on another group, where its peer meets already. So the groups of a mesh meet when they
are made (`ds_core.comm.open_transports`); other groups at their first synchronous collective, which blocks anyhow.

[Note: which way messages go] A receive must look where its message is, so the way of a group's messages is chosen once:
the transport's, if it opened before the first of them on any rank, else the backend's. Tags other than 0 are always the
backend's.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from ds_core.comm import gloo
from ds_core.comm.lane import AfterWork, Lane, LaneWork
from ds_core.errors import CommError

__all__ = ["Meeting", "Opener", "Transport", "backend_only", "configure", "reset"]

log = logging.getLogger("ds_core.comm")

RECORD = 2048
"""Bytes that each rank can tell the others in one `Meeting.swap`."""
# torch's enumeration tells names only of some of its values.
_NAMES = {getattr(ReduceOp, name): name for name in ("SUM", "AVG", "MAX", "MIN", "PRODUCT", "BAND", "BOR", "BXOR")}
_TAG = 0  # the kind of message in a lane's tag; a transport has no kinds
_DEFAULT_TIMEOUT = 1800.0


class Transport(Protocol):
    """Runs collectives on flat contiguous CPU tensors, each on all ranks of a group; blocks, and raises CommError.

    op: a name of torch's ReduceOp. tag: 0, or what must be equal on all ranks; where it is not, the call waits until
    an interceptor ends the process.
    """

    def takes(self, kind: str, size: int, dtype: torch.dtype, op: str) -> bool:
        """Whether to run this one here; the same on every rank. size: bytes of the whole buffer, of all ranks."""

    def all_reduce(self, flat: Tensor, op: str, tag: int) -> None:
        """Replace `flat` by the reduction, in rank order."""

    def reduce_scatter(self, output: Tensor, input: Tensor, op: str, tag: int) -> None:
        """Fill `output` with this rank's part of the reduction of `input`."""

    def all_gather(self, parts: Sequence[Tensor], mine: Tensor, tag: int) -> None:
        """Fill `parts[i]` with rank i's `mine`; lengths may differ."""

    def isend(self, flat: Tensor, to: int) -> Any:
        """Start sending any number of bytes to rank `to` of the group; a work. Blocks in no case, nor does `irecv`.

        Messages of two ranks arrive in the order in which they were sent, in that in which receives were posted. A
        sender need not wait longer than until the receive is posted. Both are independent of collectives.
        """

    def irecv(self, flat: Tensor, source: int | None) -> Any:
        """Start receiving from rank `source` of the group, None: from any; a work that then has a `source`."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """What an opener is given: a group's ranks, all there at once.

    rank, size: in the group. names: the ranks' numbers in the world. timeout: of collectives, in seconds.
    swap: gives this rank's JSON object to all, and returns theirs in rank order; collective.
    """

    rank: int
    size: int
    names: tuple[int, ...]
    timeout: float
    swap: Callable[[dict[str, Any]], list[dict[str, Any]]]


Opener = Callable[[Meeting], "Transport | None"]

_opener: Opener | None = None


def configure(opener: Opener | None) -> None:
    """Open transports with `opener` from here on (None: use none). Every rank calls it between the same collectives."""
    global _opener
    _opener = None if opener is backend_only else opener


def reset() -> None:
    """Use no transport; those that are open stay until their groups are destroyed."""
    configure(None)


def backend_only(meeting: Meeting) -> Transport | None:
    """The reference of ``collectives``: the process group's backend."""
    return None


def open_transport(lane: Lane) -> None:
    """Let the ranks of `lane` meet, unless they have; blocks until all are there."""
    if _opener is not None and lane.opener is not _opener:
        lane.opener, lane.transport = _opener, None
        meeting = _meeting(lane)
        lane.transport = _opener(meeting)
        # See [Note: which way messages go].
        if lane.transport is not None and not any(r["messages"] for r in meeting.swap({"messages": lane.messages})):
            lane.post = lane.transport


def serves(lane: Lane, kind: str, size: int, dtype: torch.dtype, op: Any = None, *, async_op: bool) -> bool:
    """Whether the functions below are to run this collective. See [Note: when ranks meet]."""
    if _opener is None or size == 0:
        return False
    if lane.opener is not _opener:
        if async_op:
            return False
        open_transport(lane)
    return lane.transport is not None and bool(lane.transport.takes(kind, size, dtype, _NAMES.get(op, "")))


def carries(lane: Lane, peer: int | None, tag: int) -> bool:
    """Whether the lane's `post` is to carry this message; peer: global rank. To be asked once per message."""
    if tag != 0 or peer == dist.get_rank():  # torch has an error for messages to oneself
        return False
    lane.messages = True
    return lane.post is not None


def all_reduce(flat: Tensor, op: Any, lane: Lane, async_op: bool) -> AfterWork | LaneWork | None:
    """As `gloo.all_reduce`."""
    transport, name, tag = lane.transport, _NAMES[op], _tag(lane)
    return lane.run(lambda: transport.all_reduce(flat, name, tag), async_op, False)


def reduce_scatter(output: Tensor, input: Tensor, op: Any, lane: Lane, async_op: bool) -> AfterWork | LaneWork | None:
    """As `gloo.reduce_scatter`."""
    transport, name, tag = lane.transport, _NAMES[op], _tag(lane)
    return lane.run(lambda: transport.reduce_scatter(output, input, name, tag), async_op, False)


def all_gather_parts(
    parts: Sequence[Tensor], mine: Tensor, lane: Lane, async_op: bool, whole: Tensor | None = None
) -> AfterWork | LaneWork | None:
    """As `gloo.all_gather_parts`."""
    transport, tag = lane.transport, _tag(lane)
    return lane.run(lambda: transport.all_gather(parts, mine, tag), async_op, False)


def exchanges(lane: Lane, *, async_op: bool) -> bool:
    """Whether `all_to_all` is to run the group's. See [Note: when ranks meet].

    It has a transport of its own, since its parts are messages, which must not meet others between the same ranks.
    """
    if _opener is None:
        return False
    if lane.swap_opener is not _opener:
        if async_op:
            return False
        lane.swap_opener, lane.swapper = _opener, None
        lane.swapper = _opener(_meeting(lane))
    return lane.swapper is not None


def all_to_all(taken: Sequence[Tensor], given: Sequence[Tensor], lane: Lane) -> AfterWork:
    """Fill `taken[r]` with what rank r gives this one; flat tensors, of which both sides know the length."""
    works = []
    for there, move in ((taken, lane.swapper.irecv), (given, lane.swapper.isend)):
        works += [move(there[rank], rank) for rank in lane.peers() if there[rank].numel()]
    taken[lane.rank].copy_(given[lane.rank])
    return AfterWork(works)


def broadcast(flat: Tensor, src: int, lane: Lane, async_op: bool) -> AfterWork | LaneWork | None:
    """Replace `flat` by that of rank `src` of the group: the others gather nothing to it."""
    parts = [flat if r == src else flat[:0] for r in range(lane.size)]
    return all_gather_parts(parts, parts[lane.rank], lane, async_op)


def _tag(lane: Lane) -> int:
    return lane.tag(_TAG) if lane.tagged else 0


def _meeting(lane: Lane) -> Meeting:
    def swap(mine: dict[str, Any]) -> list[dict[str, Any]]:
        text = json.dumps(mine).encode()
        if len(text) > RECORD:
            raise CommError(f"a record of {len(text)} bytes to swap; at most {RECORD} are carried")
        record = torch.frombuffer(bytearray(text.ljust(RECORD)), dtype=torch.uint8)
        all_records = torch.empty(lane.size * RECORD, dtype=torch.uint8)
        rows = all_records.view(lane.size, RECORD).unbind()
        gloo.all_gather_parts(rows, record, lane, False, all_records)
        return [json.loads(bytes(row.tolist())) for row in rows]

    group = lane.group
    return Meeting(lane.rank, lane.size, tuple(dist.get_process_group_ranks(group)), _timeout(group), swap)


def _timeout(group: Any) -> float:
    """The group's, as its backend was given it; torch tells it nowhere in public."""
    try:
        return float(group._get_backend(torch.device("cpu")).options._timeout.total_seconds())
    except (AttributeError, RuntimeError):
        return _DEFAULT_TIMEOUT
