"""What serves the collectives of a gloo group: its transport where one is open, else algorithms over messages."""

from __future__ import annotations

from collections.abc import Sequence
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
            return NotImplemented
        if (transport := self._taker("all_reduce", tensor, op, async_op)) is None:
            return gloo.all_reduce(tensor, op, self.queue, async_op)
        name, tag = _NAMES[op], self._tag()
        return self.queue.run(lambda: transport.all_reduce(tensor, name, tag), async_op, False)

    def reduce_scatter(self, output: Tensor, input: Tensor, op: Any, async_op: bool) -> Any:
        """See `GroupCollectives.reduce_scatter`."""
        if op not in gloo.FOLDS:
            return NotImplemented
        if (transport := self._taker("reduce_scatter", input, op, async_op)) is None:
            return gloo.reduce_scatter(output, input, op, self.queue, async_op)
        name, tag = _NAMES[op], self._tag()
        return self.queue.run(lambda: transport.reduce_scatter(output, input, name, tag), async_op, False)

    def all_gather_into(self, output: Tensor, input: Tensor, async_op: bool) -> Any:
        """See `GroupCollectives.all_gather_into`."""
        parts = output.view(self.queue.size, -1).unbind()
        if (transport := self._taker("all_gather", output, None, async_op)) is None:
            return gloo.all_gather_parts(parts, input, self.queue, async_op, output)
        tag = self._tag()
        return self.queue.run(lambda: transport.all_gather(parts, input, tag), async_op, False)

    def all_gather(self, outputs: Sequence[Tensor], input: Tensor, async_op: bool) -> Any:
        """See `GroupCollectives.all_gather`."""
        total = sum(t.nbytes for t in outputs)
        if (transport := self._taker("all_gather", input, None, async_op, total)) is None:
            return gloo.all_gather_parts(outputs, input, self.queue, async_op)
        tag = self._tag()
        return self.queue.run(lambda: transport.all_gather(outputs, input, tag), async_op, False)

    def broadcast(self, tensor: Tensor, src: int, async_op: bool) -> Any:
        """See `GroupCollectives.broadcast`; through a transport, the others gather nothing to `src`'s."""
        if (transport := self._taker("all_gather", tensor, None, async_op)) is None:
            return NotImplemented
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
            return NotImplemented
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

    def isend(self, tensor: Tensor, dst: int, tag: int) -> Any:
        """See `GroupCollectives.isend`."""
        if (carrier := self._carrier_of(tag)) is not None:
            return carrier.isend(tensor, dst)
        group = self.queue.group
        return Messages([dist.isend(tensor, dist.get_global_rank(group, dst), group, tag)])

    def irecv(self, tensor: Tensor, src: int | None, tag: int) -> Any:
        """See `GroupCollectives.irecv`."""
        if (carrier := self._carrier_of(tag)) is not None:
            return carrier.irecv(tensor, src)
        if src is None:
            return NotImplemented
        group = self.queue.group
        return Messages([dist.irecv(tensor, dist.get_global_rank(group, src), group, tag)])

    def _taker(self, kind: str, tensor: Tensor, op: Any, async_op: bool, size: int | None = None) -> Transport | None:
        """The transport, if it is to run this collective; size: bytes of the whole buffer, if that is not `tensor`."""
        size = tensor.nbytes if size is None else size
        if size == 0:
            return None
        if self._opener is not None and not async_op:
            self.open()
        if self.transport is None or not self.transport.takes(kind, size, tensor.dtype, _NAMES.get(op, "")):
            return None
        return self.transport

    def _carrier_of(self, tag: int) -> Transport | None:
        """What carries this message, None: gloo; to be asked once per message."""
        if tag != 0:
            return None
        self._messages = True
        return self.carrier

    def _tag(self) -> int:
        return self.queue.tag(_KIND) if self.queue.tagged else 0
