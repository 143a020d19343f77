"""The contract of transports: another way than gloo's messages for the collectives of a group's
ranks.

An opener is a function ``(Members) -> Transport | None``, called once per group by all its ranks
together; the answer must be of one kind on all of them. None: gloo does everything. A transport
runs one collective at a time, in the group's queue, so that their order is that of the calls on
every rank.

[Note: when a transport opens] Opening blocks until the group's ranks are all there. An asynchronous
collective must
not: a rank may first have to start one on another group, where its peer opens a transport already.
    So the groups of a mesh open theirs when they are made (`ds_core.comm.open_transport`); other
    groups at their first synchronous collective, which blocks anyhow.

[Note: which way messages go] A receive must look where its message is, so the way of a group's
messages is chosen once: the transport's, if it opened before the first of them on any rank, else
gloo's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ds_comm_gloo.group_queue import GroupQueue
from ds_comm_gloo.some_ranks import Lane, SomeRanks, wire_tag
from ds_core.errors import CommError

RECORD = 2048
"""Bytes of one rank's record in `Members.exchange`."""
_DEFAULT_TIMEOUT = 1800.0


class Transport(Protocol):
    """Runs collectives on flat contiguous CPU tensors, each on all ranks of a group; blocks, and
    raises CommError.

    op: a name of torch's ReduceOp. tag: 0, or what must be equal on all ranks; where it is not, the
    call waits until an interceptor ends the process.
    """

    def takes(self, kind: str, size: int, dtype: torch.dtype, op: str) -> bool:
        """Whether to run this one here; the same on every rank.

        size: bytes of the whole buffer, of all ranks.
        """

    def all_reduce(self, flat: Tensor, op: str, tag: int) -> None:
        """Replace `flat` by the reduction, in rank order."""

    def reduce_scatter(self, output: Tensor, parts: Sequence[Tensor], op: str, tag: int) -> None:
        """Fill `output` with the reduction of all ranks' parts for this one; ``parts[i]`` is for
        rank i.

        Lengths may differ between parts, not between ranks.
        """

    def all_gather(self, parts: Sequence[Tensor], mine: Tensor, tag: int) -> None:
        """Fill `parts[i]` with rank i's `mine`; lengths may differ."""

    def broadcast(self, flat: Tensor, src: int, tag: int) -> None:
        """Replace `flat` by that of rank `src`."""

    def isend(self, flat: Tensor, to: int) -> Any:
        """Start sending any number of bytes to rank `to` of the group; a work.

        Blocks in no case, nor does `irecv`.

        Messages of two ranks arrive in the order in which they were sent, in that in which receives
        were posted. A sender need not wait longer than until the receive is posted. Both are
        independent of collectives.
        """

    def irecv(self, flat: Tensor, source: int) -> Any:
        """Start receiving from rank `source` of the group; a work."""


@dataclass(frozen=True, slots=True)
class Members:
    """What an opener is given: the ranks of a group, all in this call at once.

    rank, size: in the group.
    names: the ranks' numbers in the world.
    timeout: of collectives, in seconds.
    exchange: gives this rank's JSON object to all, and returns theirs in rank order; collective.
    """

    rank: int
    size: int
    names: tuple[int, ...]
    timeout: float
    exchange: Callable[[dict[str, Any]], list[dict[str, Any]]]


Opener = Callable[[Members], "Transport | None"]


def members(queue: GroupQueue) -> Members:
    """The `Members` of a queue's group."""
    group = queue.group
    names = tuple(dist.get_process_group_ranks(group))
    everyone = SomeRanks(
        queue, range(queue.size), {i: f"rank {name}" for i, name in enumerate(names)}
    )
    exchange = partial(exchange_among, everyone)
    return Members(queue.rank, queue.size, names, _timeout(group), exchange)


def exchange_among(ranks: SomeRanks, mine: dict[str, Any]) -> list[dict[str, Any]]:
    """`Members.exchange` among some ranks of a group.

    What each rank knows doubles in every round, so it talks to 2 log2(size) others: gloo connects
    two ranks when they first talk (TORCH_GLOO_LAZY_INIT), and one of a large group is not to be
    connected with all of it.
    """
    # record i is that of the rank i places to the right
    records = torch.empty(ranks.size, RECORD, dtype=torch.uint8)
    records[0] = _record(mine)
    known = 1
    tag = wire_tag(0, Lane.RECORDS)
    while known < ranks.size:
        more = min(known, ranks.size - known)
        works = ranks.receive(
            records[known : known + more].view(-1), (ranks.rank + known) % ranks.size, tag
        )
        works += ranks.send(records[:more].view(-1), (ranks.rank - known) % ranks.size, tag)
        for work in works:
            work.wait()
        known += more
    return [json.loads(bytes(records[i - ranks.rank].tolist())) for i in range(ranks.size)]


def _record(mine: dict[str, Any]) -> Tensor:
    text = json.dumps(mine).encode()
    if len(text) > RECORD:
        raise CommError(f"a record of {len(text)} bytes to exchange; at most {RECORD} are carried")
    return torch.frombuffer(bytearray(text.ljust(RECORD)), dtype=torch.uint8)


def _timeout(group: Any) -> float:
    """The group's, as its backend was given it; torch tells it nowhere in public."""
    try:
        return float(group._get_backend(torch.device("cpu")).options._timeout.total_seconds())
    except (AttributeError, RuntimeError):
        return _DEFAULT_TIMEOUT
