"""Talk between the ranks' background threads, over a process group of their own.

Collectives of training are not disturbed: each group has connections of its own, and no two calls
on one group run at once. Torch's plain collectives are used, since those of `ds_core.comm` are
labelled and counted as training's.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

BLOCK = 8 << 20
"""Bytes of a message between hosts."""
PATIENCE = timedelta(minutes=10)


class Circle(NamedTuple):
    """The hosts, each with one rank that speaks for it.

    leaders: that rank of each host.
    host_of: the number of each rank's host.
    group: of all ranks, over gloo; None where there is one.
    """

    rank: int
    leaders: Sequence[int]
    host_of: Sequence[int]
    group: dist.ProcessGroup | None

    @property
    def host(self) -> int:
        """The number of this rank's host."""
        return self.host_of[self.rank]

    @property
    def leads(self) -> bool:
        """Whether this rank speaks for its host."""
        return self.leaders[self.host] == self.rank

    def members(self, host: int) -> list[int]:
        """The ranks of a host."""
        return [rank for rank, own in enumerate(self.host_of) if own == host]


def form(rank: int, hosts: Sequence[int]) -> Circle:
    """hosts: by rank, the lowest rank of its host. Collective."""
    leaders = sorted(set(hosts))
    group = dist.new_group(backend="gloo", timeout=PATIENCE) if len(hosts) > 1 else None
    return Circle(rank, leaders, [leaders.index(first) for first in hosts], group)


def tell_all(circle: Circle, row: Any) -> list[Any]:
    """Every rank's `row` (JSON), in rank order. Collective among the threads."""
    if circle.group is None:
        return [row]
    text = torch.frombuffer(bytearray(json.dumps(row).encode()), dtype=torch.uint8)
    size = len(circle.host_of)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
    dist.all_gather(lengths, torch.tensor([text.numel()]), group=circle.group)
    widths = [int(n) for n in lengths]
    padded = torch.zeros(max(widths), dtype=torch.uint8)
    padded[: text.numel()] = text
    rows = [torch.empty_like(padded) for _ in range(size)]
    dist.all_gather(rows, padded, group=circle.group)
    return [json.loads(bytes(r[:n].numpy())) for r, n in zip(rows, widths, strict=True)]


def send_to_all(circle: Circle, data: bytes) -> bytes:
    """Rank 0's `data`, on every rank. Collective among the threads."""
    if circle.group is None:
        return data
    length = torch.tensor([len(data)])
    dist.broadcast(length, 0, group=circle.group)
    block = torch.zeros(int(length), dtype=torch.uint8)
    if circle.rank == 0:
        block.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    dist.broadcast(block, 0, group=circle.group)
    return bytes(block.numpy())


class Pace:
    """Keeps what is sent below a number of bytes per second."""

    def __init__(self, most: int | None) -> None:
        self._most = most
        self._began = time.monotonic()
        self._sent = 0

    def add(self, count: int) -> None:
        """`count` bytes are sent: wait until they may have been."""
        self._sent += count
        if self._most is not None:
            ahead = self._sent / self._most - (time.monotonic() - self._began)
            time.sleep(max(0.0, ahead))


def swap(
    circle: Circle, to: int, out: Iterator[Tensor], source: int, sizes: Sequence[int], pace: Pace
) -> Iterator[Tensor]:
    """Send the blocks `out` to rank `to`; the blocks of `sizes` bytes that rank `source` sends.

    Both go on at once, a block each at a time. The blocks of both sides are at most `BLOCK` bytes.
    """
    assert circle.group is not None
    waiting = list(sizes)
    while True:
        sent = next(out, None)
        taken = torch.empty(waiting.pop(0), dtype=torch.uint8) if waiting else None
        if sent is None and taken is None:
            return
        works = []
        if sent is not None:
            works.append(dist.isend(sent, to, group=circle.group))
        if taken is not None:
            works.append(dist.irecv(taken, source, group=circle.group))
        for work in works:
            if work is not None:
                work.wait()
        if sent is not None:
            pace.add(sent.numel())
        if taken is not None:
            yield taken
