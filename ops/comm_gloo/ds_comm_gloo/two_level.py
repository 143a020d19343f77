"""Collectives of groups that span several hosts with several ranks each, in two levels.

Inside a host data goes through a transport (shared memory), where one opens, else by messages;
between hosts it goes by messages, and crosses the link once per host, not once per rank. The first
ranks of each host, as many as the smallest host has, are its carriers; the r-th ones of all hosts
form rail r, and each rail carries a slice of its own. For an all_reduce the carriers of a host get
slices of the host's sum, exchange them on their rails, and share the totals with their host. Long
tensors go in blocks, through a `Pipeline`.

[Note: the order of sums] Host by host, in the order of the hosts' first ranks, and rank by rank in
each: the same bits on every rank and in every run, whatever the size. 16-bit floats are added in
fp32, also across the link, and rounded once.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from ds_comm_gloo import gloo
from ds_comm_gloo.group_queue import GroupQueue, Messages
from ds_comm_gloo.hosts import Hosts
from ds_comm_gloo.pipeline import Pipeline, Stages
from ds_comm_gloo.some_ranks import Lane, PeerWork, SomeRanks, wire_tag
from ds_comm_gloo.transports import Members, Opener, Transport, exchange_among
from ds_core.comm.providers import average

log = logging.getLogger("ds_comm_gloo")

MESSAGE = 1 << 20
"""Bytes of a message on a rail; longer tensors go in blocks of such messages."""

DIRECT = 1 << 16
"""all_reduce of up to so many bytes: carriers send each other all they have; one trip over the link
instead of two.
"""

_REAL = (
    torch.float32,
    torch.float64,
    *gloo.LOW,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
)
_BITS = ("BAND", "BOR", "BXOR")


def open_two_level(
    queue: GroupQueue, members: Members, hosts: Hosts, opener: Opener | None, lane: int
) -> TwoLevel:
    """The transport of a group on several hosts. Collective.

    opener: opens the transport of one host's ranks; None: they have none.
    lane: of messages between hosts.
    """
    names = {
        rank: f"rank {members.names[rank]} on {host.name}"
        for host in hosts.hosts
        for rank in host.ranks
    }
    mine = next(host for host in hosts.hosts if queue.rank in host.ranks)
    inner = SomeRanks(queue, mine.ranks, names)
    inside = None
    if opener is not None and inner.size > 1:
        world = tuple(members.names[rank] for rank in mine.ranks)
        inside = opener(
            Members(
                inner.rank,
                inner.size,
                world,
                members.timeout,
                lambda record: exchange_among(inner, record),
            )
        )
    rail = None
    if inner.rank < hosts.rails:
        rail = SomeRanks(queue, [host.ranks[inner.rank] for host in hosts.hosts], names)
    rows = "; ".join(
        f"{host.name} has {[members.names[rank] for rank in host.ranks]}" for host in hosts.hosts
    )
    log.debug("collectives of ranks %s go in two levels: %s", members.names, rows)
    return TwoLevel(queue, hosts, inner, inside, rail, lane)


class TwoLevel:
    """As a `Transport`, over hosts, but that its collectives give blocks, which its `pipeline`
    runs.

    Parts of `reduce_scatter` and `all_gather` must have one length.

    inner: the ranks of this host.
    inside: their transport; None: messages.

    rail: this rank's; None: it carries nothing.
    lane: of messages between hosts.
    """

    def __init__(
        self,
        queue: GroupQueue,
        hosts: Hosts,
        inner: SomeRanks,
        inside: Transport | None,
        rail: SomeRanks | None,
        lane: int,
    ) -> None:
        self._queue = queue
        self._inner = inner
        self._rail = rail
        self._lane = lane
        self.inside = inside
        self.hosts = [host.ranks for host in hosts.hosts]
        self._host = self.hosts.index(inner.ranks)
        self._others = [(self._host + d) % len(self.hosts) for d in range(1, len(self.hosts))]
        self._rails = hosts.rails
        self._even = hosts.even
        self.pipeline = Pipeline(functools.partial(_agree, inner, inside))

    def takes(self, kind: str, size: int, dtype: torch.dtype, op: str) -> bool:
        """See `Transport`."""
        if kind != "all_gather" and dtype == torch.bool:
            return op != "AVG"
        return kind == "all_gather" or (
            dtype in _REAL and not (op in _BITS and dtype.is_floating_point)
        )

    # -- reductions --------------------------------------------------------------------------------

    def all_reduce(self, flat: Tensor, op: str, tag: int) -> Iterator[Stages]:
        """See `Transport`."""
        # Between two hosts the direct exchange has no more bytes, unless they are widened.
        direct = flat.nbytes <= DIRECT or (len(self.hosts) == 2 and not _widens(flat.dtype, op))
        step = MESSAGE // flat.itemsize * self._rails * (1 if direct else len(self.hosts))
        return (
            self._reduce_block(flat[begin:end], op, direct, tag)
            for begin, end in gloo.cut(len(flat), step)
        )

    def _reduce_block(self, block: Tensor, op: str, direct: bool, tag: int) -> Stages:
        # 1. Inside each host: carrier r gets slice r of the host's sum.
        totals = self._slices(block)
        mine = self._reduce_inside(self._slices(_wide(block, op)), op, tag)
        # 2. On each rail: either all of a slice to everybody (one trip), or to each host a part of
        # it.
        sent, kept = (
            [t] * len(self.hosts) if direct else t.tensor_split(len(self.hosts))
            for t in (mine, totals[self._inner.rank])
        )
        rows = [
            sent[h] if h == self._host else torch.empty_like(sent[self._host])
            for h in range(len(self.hosts))
        ]
        yield self._rail.scatter(rows, sent, tag) if self._rail else ()
        # 3. The hosts' sums are added in the order of the hosts, the same on every carrier.
        self._fold(kept[self._host], rows, op)
        # 4. Each host has the total of its part: the rail gives it to the others.
        if not direct:
            yield self._rail.gather(kept, kept[self._host], tag, Lane.TOTAL) if self._rail else ()
        # 5. Inside each host: carriers share the totals with all.
        self._gather_inside(totals, tag)

    def reduce_scatter(
        self, output: Tensor, parts: Sequence[Tensor], op: str, tag: int
    ) -> Iterator[Stages]:
        """See `Transport`."""
        return (
            self._scatter_block(output[begin:end], [p[begin:end] for p in parts], op, tag)
            for begin, end in gloo.cut(len(output), MESSAGE // output.itemsize)
        )

    def _scatter_block(self, output: Tensor, rows: Sequence[Tensor], op: str, tag: int) -> Stages:
        """rows: what this rank has for each rank, all as long as `output`."""
        region = output
        lane = wire_tag(tag, Lane.SCATTER)
        totals: Sequence[Tensor] = [output] * self._inner.size
        # Hosts of unequal size: a carrier's slice is of all rows of the host together, and is
        # shared and cut to rows at the end.
        if not self._even:
            region = output.new_empty(len(output) * self._inner.size)
            totals = self._slices(region)
        total = totals[self._inner.rank]
        dtype = torch.float32 if _widens(output.dtype, op) else output.dtype
        sums = {host: torch.empty_like(total, dtype=dtype) for host in self._others}
        works: list[PeerWork] = []
        if self._rail:
            works += [
                work for host in self._others for work in self._rail.receive(sums[host], host, lane)
            ]
        # The own host's sum last: it needs no link, and others' messages are under way meanwhile.
        for host in self._others:
            partial = self._reduce_inside(self._shares(host, rows, op), op, tag)
            works += self._rail.send(partial, host, lane) if self._rail else ()
        sums[self._host] = self._reduce_inside(self._shares(self._host, rows, op), op, tag)
        yield works
        self._fold(total, [sums[host] for host in range(len(self.hosts))], op)
        if not self._even:
            self._gather_inside(totals, tag)
            gloo.copy(output, region.view(self._inner.size, -1)[self._inner.rank])

    def _shares(self, host: int, rows: Sequence[Tensor], op: str) -> list[Tensor]:
        """What the carriers of this host are to add up and send to `host`: whole rows where hosts
        are even, else cuts of all rows together."""
        mine = [rows[rank] for rank in self.hosts[host]]
        if self._even:
            return [_wide(row, op) for row in mine]
        return self._slices(_wide(_join(mine), op))

    def _reduce_inside(self, parts: Sequence[Tensor], op: str, tag: int) -> Tensor:
        """The sum of this host's ranks of this rank's part; it may be `parts`' own tensor, to be
        left as it is.
        """
        if self._inner.size == 1:
            return parts[0]
        out = torch.empty_like(parts[self._inner.rank])
        # The average is taken once, over all ranks, when the hosts' sums are added.
        op = "SUM" if op == "AVG" else op
        inside = self.inside
        if inside is not None and inside.takes(
            "reduce_scatter", sum(p.nbytes for p in parts), out.dtype, op
        ):
            inside.reduce_scatter(out, parts, op, tag)
        else:
            self._inner.reduce_scatter(out, parts, op, tag)
        return out

    def _fold(self, out: Tensor, sums: Sequence[Tensor], op: str) -> None:
        """Write the reduction of the hosts' `sums`, in their order, into `out`."""
        if not len(out):
            return
        total = out if out.dtype == sums[0].dtype else torch.empty_like(sums[0])
        gloo.reduce_parts(total, sums, ReduceOp.SUM if op == "AVG" else getattr(ReduceOp, op))
        if op == "AVG":
            average(total, self._queue.size)
        if total is not out:
            gloo.copy(out, total)

    # -- what is only moved ------------------------------------------------------------------------

    def all_gather(self, parts: Sequence[Tensor], mine: Tensor, tag: int) -> Iterator[Stages]:
        """See `Transport`."""
        if parts[self._queue.rank].data_ptr() != mine.data_ptr():
            gloo.copy(parts[self._queue.rank], mine)
        return (
            self._gather_block([p[begin:end] for p in parts], tag)
            for begin, end in gloo.cut(len(mine), MESSAGE // mine.itemsize)
        )

    def _gather_block(self, rows: Sequence[Tensor], tag: int) -> Stages:
        """rows: all ranks', this one's being there."""
        by_host = [[rows[rank] for rank in ranks] for ranks in self.hosts]
        joined: list[Tensor] = []
        shares = by_host
        # Unequal hosts: all rows of a host are put together, and cut for as many carriers as every
        # host has.
        if not self._even:
            self._gather_inside(by_host[self._host], tag)
            joined = [
                _join(mine) if h == self._host else mine[0].new_empty(len(mine) * len(mine[0]))
                for h, mine in enumerate(by_host)
            ]
            shares = [self._slices(whole) for whole in joined]
        works: Sequence[PeerWork] = ()
        if self._rail:
            carried = [share[self._inner.rank] for share in shares]
            works = self._rail.gather(carried, carried[self._host], tag)
        # Inside the host while the rail's messages are under way.
        if self._even:
            self._gather_inside(by_host[self._host], tag)
        yield works
        for host in self._others:
            self._gather_inside(shares[host], tag)
            if not self._even:
                for row, piece in zip(
                    by_host[host], joined[host].split(len(by_host[host][0])), strict=True
                ):
                    gloo.copy(row, piece)

    def broadcast(self, flat: Tensor, src: int, tag: int) -> Iterator[Stages]:
        """See `Transport`.

        From host to host in a chain; one block goes from the first host to all.
        """
        raw = flat.view(torch.uint8)
        step = MESSAGE * self._rails
        chain = len(raw) > step
        return (
            self._broadcast_block(raw[begin:end], src, chain, tag)
            for begin, end in gloo.cut(len(raw), step)
        )

    def _broadcast_block(self, block: Tensor, src: int, chain: bool, tag: int) -> Stages:
        first = next(h for h, ranks in enumerate(self.hosts) if src in ranks)
        order = [(first + d) % len(self.hosts) for d in range(len(self.hosts))]
        place = order.index(self._host)
        lane = wire_tag(tag, Lane.SPREAD)
        # A chain for long tensors: each host sends on what it has, block by block, so that no link
        # carries more than the tensor once.
        source = order[place - 1] if chain else first
        # In the first host the source gives its block to the carriers.
        onward = order[place + 1 : place + 2] if chain else order[1:] if place == 0 else ()
        slices = self._slices(block)
        mine = slices[self._inner.rank]
        if place == 0:
            self._gather_inside(
                [block if rank == src else block[:0] for rank in self._inner.ranks], tag
            )
        yield self._rail.receive(mine, source, lane) if self._rail and place > 0 else ()
        sending = (
            [work for host in onward for work in self._rail.send(mine, host, lane)]
            if self._rail
            else ()
        )
        if place > 0:
            self._gather_inside(slices, tag)
        yield sending

    def _gather_inside(self, parts: Sequence[Tensor], tag: int) -> None:
        """Let this host's ranks have ``parts[i]`` of its i-th."""
        if self._inner.size == 1:
            return
        mine = parts[self._inner.rank]
        if self.inside is not None and self.inside.takes(
            "all_gather", sum(p.nbytes for p in parts), mine.dtype, ""
        ):
            self.inside.all_gather(parts, mine, tag)
        else:
            self._inner.all_gather(parts, mine, tag)

    def _slices(self, whole: Tensor) -> list[Tensor]:
        """`whole` cut for the carriers; nothing for the other ranks of this host."""
        return [*whole.tensor_split(self._rails), *[whole[:0]] * (self._inner.size - self._rails)]

    # -- messages ----------------------------------------------------------------------------------

    def isend(self, flat: Tensor, to: int) -> Any:
        """See `Transport`."""
        if self.inside is not None and to in self._inner.ranks:
            return self.inside.isend(flat, self._inner.ranks.index(to))
        return Messages([self._queue.send(flat, to, wire_tag(0, self._lane))])

    def irecv(self, flat: Tensor, source: int) -> Any:
        """See `Transport`."""
        if self.inside is not None and source in self._inner.ranks:
            return self.inside.irecv(flat, self._inner.ranks.index(source))
        return Messages([self._queue.recv(flat, source, wire_tag(0, self._lane))])


def _agree(inner: SomeRanks, inside: Transport | None, mine: bool) -> bool:
    """Whether all ranks of the host say so."""
    if inner.size == 1:
        return mine
    votes = torch.zeros(inner.size, 1, dtype=torch.uint8)
    votes[inner.rank] = mine
    rows = votes.unbind()
    (inner if inside is None else inside).all_gather(rows, rows[inner.rank], 0)
    return bool(votes.all())


def _widens(dtype: torch.dtype, op: str) -> bool:
    return dtype in gloo.LOW and op in ("SUM", "AVG", "PRODUCT")


def _wide(tensor: Tensor, op: str) -> Tensor:
    """`tensor` in the dtype in which it is reduced."""
    if not _widens(tensor.dtype, op):
        return tensor
    wide = torch.empty_like(tensor, dtype=torch.float32)
    gloo.copy(wide, tensor)
    return wide


def _join(rows: Sequence[Tensor]) -> Tensor:
    """The rows, of one length, behind each other."""
    whole = rows[0].new_empty(len(rows) * len(rows[0]))
    for piece, row in zip(whole.split(len(rows[0])), rows, strict=True):
        gloo.copy(piece, row)
    return whole
