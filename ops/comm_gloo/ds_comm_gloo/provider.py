"""What serves the collectives of a gloo group: its transport where one is open, else algorithms over messages."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from ds_comm_gloo import gloo
from ds_comm_gloo.group_queue import GroupQueue, Messages
from ds_comm_gloo.transports import Opener, Transport, members
from ds_core.comm import AfterWork, GroupCollectives

__all__ = ["GlooCollectives"]

# torch's enumeration tells names only of some of its values.
_NAMES = {getattr(ReduceOp, name): name for name in ("SUM", "AVG", "MAX", "MIN", "PRODUCT", "BAND", "BOR", "BXOR")}
_KIND = 0  # the kind of message in a queue's tag; a transport has no kinds


class GlooCollectives(GroupCollectives):
    """Collectives of one gloo group on CPU tensors; see `GroupCollectives`.

    opener: opens the group's transport; None: it has none. See the notes of `ds_comm_gloo.transports`. Once open,
    `transport` serves reductions and gathers, and `carrier` messages; `exchanger` has all_to_all to itself, since its
    parts are messages, which must not be mixed up with others between the same ranks.
    """

    def __init__(self, group: ProcessGroup, messages: bool, opener: Opener | None = None) -> None:
        super().__init__(group, messages)
        self.queue = GroupQueue(group)
        self.transport: Transport | None = None
        self.carrier: Transport | None = None
        self.exchanger: Transport | None = None
        self._messages = messages  # whether there have been any, by whatever way
        self._opener = self._exchange_opener = opener

    def open(self) -> None:
        """See `GroupCollectives.open`."""
        opener, self._opener = self._opener, None
        if opener is None:
            return
        ranks = members(self.queue)
        self.transport = opener(ranks)
        if self.transport is not None and not any(r["messages"] for r in ranks.exchange({"messages": self._messages})):
            self.carrier = self.transport

    def all_reduce(self, tensor: Tensor, op: Any, async_op: bool) -> Any:
        """See `GroupCollectives.all_reduce`."""
        if op not in gloo.FOLDS:
            return super().all_reduce(tensor, op, async_op)
        if (transport := self._taker("all_reduce", tensor, op, async_op)) is None:
            return gloo.all_reduce(tensor, op, self.queue, async_op)
        name, tag = _NAMES[op], self._tag()
        return self.queue.run(lambda: transport.all_reduce(tensor, name, tag), async_op, False)

    def reduce_scatter(self, output: Tensor, input: Tensor, op: Any, async_op: bool) -> Any:
        """See `GroupCollectives.reduce_scatter`."""
        if op not in gloo.FOLDS:
            return super().reduce_scatter(output, input, op, async_op)
        if (transport := self._taker("reduce_scatter", input, op, async_op)) is None:
            return gloo.reduce_scatter(output, input, op, self.queue, async_op)
        name, tag = _NAMES[op], self._tag()
        return self.queue.run(lambda: transport.reduce_scatter(output, input, name, tag), async_op, False)

    def all_gather_into(self, output: Tensor, input: Tensor, async_op: bool) -> Any:
        """See `GroupCollectives.all_gather_into`."""
        if (transport := self._taker("all_gather", output, None, async_op)) is None:
            return gloo.all_gather(output, input, self.queue, async_op)
        parts, tag = output.view(self.queue.size, -1).unbind(), self._tag()
        return self.queue.run(lambda: transport.all_gather(parts, input, tag), async_op, False)

    def broadcast(self, tensor: Tensor, src: int, async_op: bool) -> Any:
        """See `GroupCollectives.broadcast`; through a transport, the others gather nothing to `src`'s."""
        if (transport := self._taker("all_gather", tensor, None, async_op)) is None:
            return super().broadcast(tensor, src, async_op)
        parts, tag = [tensor if r == src else tensor[:0] for r in range(self.queue.size)], self._tag()
        return self.queue.run(lambda: transport.all_gather(parts, parts[self.queue.rank], tag), async_op, False)

    def all_to_all(
        self, output: Tensor, input: Tensor, taken: list[int] | None, given: list[int] | None, async_op: bool
    ) -> Any:
        """See `GroupCollectives.all_to_all`."""
        if self._exchange_opener is not None and not async_op:
            opener, self._exchange_opener = self._exchange_opener, None
            self.exchanger = opener(members(self.queue))
        if self.exchanger is None:
            return super().all_to_all(output, input, taken, given, async_op)
        queue, works = self.queue, []
        outputs = output.split(taken or [output.numel() // queue.size] * queue.size)
        inputs = input.split(given or [input.numel() // queue.size] * queue.size)
        for there, move in ((outputs, self.exchanger.irecv), (inputs, self.exchanger.isend)):
            works += [move(there[rank], rank) for rank in queue.peers() if there[rank].numel()]
        outputs[queue.rank].copy_(inputs[queue.rank])
        work = AfterWork(works)
        if async_op:
            return work
        work.wait()
        return None

    def isend(self, tensor: Tensor, dst: int) -> Any:
        """See `GroupCollectives.isend`."""
        self._messages = True
        if self.carrier is not None:
            return self.carrier.isend(tensor, dst)
        return Messages([dist.isend(tensor, dist.get_global_rank(self.group, dst), self.group)])

    def irecv(self, tensor: Tensor, src: int) -> Any:
        """See `GroupCollectives.irecv`."""
        self._messages = True
        if self.carrier is not None:
            return self.carrier.irecv(tensor, src)
        return Messages([dist.irecv(tensor, dist.get_global_rank(self.group, src), self.group)])

    def _taker(self, kind: str, tensor: Tensor, op: Any, async_op: bool) -> Transport | None:
        """The transport, if it is to run this collective."""
        if tensor.nbytes == 0:
            return None
        if self._opener is not None and not async_op:
            self.open()
        if self.transport is None or not self.transport.takes(kind, tensor.nbytes, tensor.dtype, _NAMES.get(op, "")):
            return None
        return self.transport

    def _tag(self) -> int:
        return self.queue.tag(_KIND) if self.queue.tagged else 0
