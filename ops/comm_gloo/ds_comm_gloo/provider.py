"""What serves the collectives of a gloo group: its transport where one is open, else algorithms
over messages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from ds_comm_gloo import gloo
from ds_comm_gloo.group_queue import GroupQueue, Messages, QueueWork
from ds_comm_gloo.hosts import Hosts, host_key, meet
from ds_comm_gloo.some_ranks import Lane
from ds_comm_gloo.transports import Members, Opener, Transport, members
from ds_comm_gloo.two_level import TwoLevel, open_two_level
from ds_core.comm import AfterWork, GroupCollectives

# torch's enumeration tells names only of some of its values.
_NAMES = {
    getattr(ReduceOp, name): name
    for name in ("SUM", "AVG", "MAX", "MIN", "PRODUCT", "BAND", "BOR", "BXOR")
}
_KIND = 0  # the kind of message in a queue's tag; a transport has no kinds


class GlooCollectives(GroupCollectives):
    """Collectives of one gloo group on CPU tensors; see `GroupCollectives`.

    opener: opens the transport of ranks on one host; None: there is none. See the notes of
        `ds_comm_gloo.transports`. Once open, `transport` serves reductions and gathers, and
        `carrier` messages; `exchanger` has all_to_all to itself, since its parts are messages,
        which must not be mixed up with others between the same ranks.
    key: tells which ranks share a host, those whose keys are equal.
    """

    def __init__(
        self,
        group: ProcessGroup,
        messages: bool,
        opener: Opener | None = None,
        key: Callable[[], str] = host_key,
    ) -> None:
        super().__init__(group, messages)
        self.queue = GroupQueue(group)
        self.transport: Transport | TwoLevel | None = None
        self.carrier: Transport | TwoLevel | None = None
        self.exchanger: Transport | TwoLevel | None = None
        self._messages = messages  # whether there have been any, by whatever way
        self._opener = opener
        self._key = key
        self._hosts: Hosts | None = None
        self._unopened = True
        self._exchanges = opener is not None

    def open(self) -> None:
        """See `GroupCollectives.open`."""
        if not self._unopened:
            return
        self._unopened = False
        ranks = members(self.queue)
        self.transport = self._open(ranks, Lane.CARRIED)
        if self.transport is not None and not any(
            r["messages"] for r in ranks.exchange({"messages": self._messages})
        ):
            self.carrier = self.transport

    def _open(self, ranks: Members, lane: int) -> Transport | TwoLevel | None:
        """A transport of the group; collective.

        lane: of its messages between hosts.
        """
        self._hosts = self._hosts or meet(ranks, self._key())
        if self._hosts.two_level:
            return open_two_level(self.queue, ranks, self._hosts, self._opener, lane)
        return None if self._opener is None else self._opener(ranks)

    def all_reduce(self, tensor: Tensor, op: Any, async_op: bool) -> Any:
        """See `GroupCollectives.all_reduce`."""
        if op not in gloo.FOLDS:
            return super().all_reduce(tensor, op, async_op)
        if (transport := self._taker("all_reduce", tensor, op, async_op)) is None:
            return gloo.all_reduce(tensor, op, self.queue, async_op)
        name = _NAMES[op]
        tag = self._tag()
        return self._run(
            lambda: transport.all_reduce(tensor, name, tag), async_op, tensor.is_inference()
        )

    def reduce_scatter(self, output: Tensor, input: Tensor, op: Any, async_op: bool) -> Any:
        """See `GroupCollectives.reduce_scatter`."""
        if op not in gloo.FOLDS:
            return super().reduce_scatter(output, input, op, async_op)
        if (transport := self._taker("reduce_scatter", input, op, async_op)) is None:
            return gloo.reduce_scatter(output, input, op, self.queue, async_op)
        parts = input.view(self.queue.size, -1).unbind()
        name = _NAMES[op]
        tag = self._tag()
        return self._run(
            lambda: transport.reduce_scatter(output, parts, name, tag),
            async_op,
            output.is_inference(),
        )

    def all_gather_into(self, output: Tensor, input: Tensor, async_op: bool) -> Any:
        """See `GroupCollectives.all_gather_into`."""
        if (transport := self._taker("all_gather", output, None, async_op)) is None:
            return gloo.all_gather(output, input, self.queue, async_op)
        parts = output.view(self.queue.size, -1).unbind()
        tag = self._tag()
        return self._run(
            lambda: transport.all_gather(parts, input, tag), async_op, output.is_inference()
        )

    def broadcast(self, tensor: Tensor, src: int, async_op: bool) -> Any:
        """See `GroupCollectives.broadcast`."""
        if (transport := self._taker("all_gather", tensor, None, async_op)) is None:
            return super().broadcast(tensor, src, async_op)
        tag = self._tag()
        return self._run(
            lambda: transport.broadcast(tensor, src, tag), async_op, tensor.is_inference()
        )

    def all_to_all(
        self,
        output: Tensor,
        input: Tensor,
        taken: list[int] | None,
        given: list[int] | None,
        async_op: bool,
    ) -> Any:
        """See `GroupCollectives.all_to_all`."""
        if self._exchanges and not async_op:
            self._exchanges = False
            self.exchanger = self._open(members(self.queue), Lane.EXCHANGED)
        if self.exchanger is None:
            return super().all_to_all(output, input, taken, given, async_op)
        queue = self.queue
        works = []
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

    def _taker(
        self, kind: str, tensor: Tensor, op: Any, async_op: bool
    ) -> Transport | TwoLevel | None:
        """The transport, if it is to run this collective."""
        if tensor.nbytes == 0:
            return None
        if not async_op:
            self.open()
        if self.transport is None or not self.transport.takes(
            kind, tensor.nbytes, tensor.dtype, _NAMES.get(op, "")
        ):
            return None
        return self.transport

    def _run(self, call: Callable[[], Any], async_op: bool, inference: bool) -> QueueWork | None:
        """Run a collective of the transport, after those before it."""
        runner = self.transport.pipeline if isinstance(self.transport, TwoLevel) else self.queue
        return runner.run(call, async_op, inference)

    def _tag(self) -> int:
        return self.queue.tag(_KIND) if self.queue.tagged else 0
