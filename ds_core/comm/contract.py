"""The contract of collectives: works, and `GroupCollectives`, which a provider implements for a group of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

__all__ = ["AfterWork", "GroupCollectives", "Work"]


class Work(Protocol):
    """A collective under way, as `async_op=True` returns it."""

    def wait(self, timeout: timedelta = ...) -> Any:
        """Block until the result is in its tensor."""

    def is_completed(self) -> bool:
        """Whether it is. torch's gloo says so of messages only after `wait`; a provider's works can be polled."""


class AfterWork:
    """Works under way, and what is left to do here when they have ended; done once, by wait or is_completed."""

    def __init__(self, works: Sequence[Any], finish: Callable[[], Any] | None = None) -> None:
        self._works, self._finish = list(works), finish

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the result is in its tensor. Raises what the backend raises."""
        for work in self._works:
            work.wait() if timeout is None else work.wait(timeout)
        self._works = []
        finish, self._finish = self._finish, None
        if finish is not None:
            with torch.no_grad():
                finish()
        return True

    def is_completed(self) -> bool:
        """Whether the result is in its tensor; finishes what has fully arrived."""
        return all(work.is_completed() for work in self._works) and self.wait()


class GroupCollectives:
    """The collectives of one process group, for tensors of one device type. Inherit, and override what is served.

    A method returns NotImplemented to leave a call to torch.distributed, on all ranks of the group or on none. Else it
    returns None when the result is in its tensor, or, with `async_op`, a `Work`. Ranks of a group make the same
    collectives in the same order, asynchronous ones too; those of different groups may cross.

    Tensors are flat and contiguous, and require no gradient; lengths and dtypes were checked. Reductions give the same
    bits on every rank; 16-bit floats are added in fp32, and AVG of integers rounds towards zero. op: torch's ReduceOp.
    Ranks are numbers in the group. An instance must not keep its group alive: it lives as long as the group.
    """

    def __init__(self, group: ProcessGroup, messages: bool) -> None:
        """messages: whether torch.distributed or another provider carried messages of the group before."""

    def open(self) -> None:
        """Set up what all ranks take part in. Collective; called where ds_core makes the group."""

    def all_reduce(self, tensor: Tensor, op: Any, async_op: bool) -> Any:
        """Replace `tensor`, on every rank, by the reduction over all ranks."""
        return NotImplemented

    def reduce(self, tensor: Tensor, dst: int, op: Any, async_op: bool) -> Any:
        """Reduce into `tensor` of rank `dst`; elsewhere its content is undefined afterwards."""
        return NotImplemented

    def reduce_scatter(self, output: Tensor, input: Tensor, op: Any, async_op: bool) -> Any:
        """Fill `output` with this rank's part of the reduction of `input`, n times as long, which stays as it is."""
        return NotImplemented

    def all_gather_into(self, output: Tensor, input: Tensor, async_op: bool) -> Any:
        """Fill `output`, n times as long, with every rank's `input`, which may lie in its place in `output` already."""
        return NotImplemented

    def all_gather(self, outputs: Sequence[Tensor], input: Tensor, async_op: bool) -> Any:
        """Fill `outputs[i]` with rank i's `input`; lengths may differ, or be 0."""
        return NotImplemented

    def broadcast(self, tensor: Tensor, src: int, async_op: bool) -> Any:
        """Replace `tensor`, on every rank, by that of rank `src`."""
        return NotImplemented

    def all_to_all(
        self, output: Tensor, input: Tensor, taken: list[int] | None, given: list[int] | None, async_op: bool
    ) -> Any:
        """Send the next ``given[i]`` elements of `input` to rank i, and put ``taken[i]`` from it into `output`.

        None: equally many for each.
        """
        return NotImplemented

    def isend(self, tensor: Tensor, dst: int, tag: int) -> Any:
        """Start sending to rank `dst`; a `Work`. All messages of a group are left to torch.distributed, or none."""
        return NotImplemented

    def irecv(self, tensor: Tensor, src: int | None, tag: int) -> Any:
        """Start receiving from rank `src`; None: from any, and the `Work` then has an attribute ``source``."""
        return NotImplemented
