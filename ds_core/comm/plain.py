"""Collectives by torch.distributed alone, on any backend, whatever of them torch lacks there."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from ds_core.comm.contract import AfterWork, GroupCollectives
from ds_core.errors import CommError

__all__ = ["PlainCollectives", "average"]

# Backends that average by themselves; the others are given a sum, which is then divided.
_AVERAGING = ("nccl", "xccl")
# torch 2.13 renamed these two and warns about the old names.
_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
# What gloo reduces in another dtype: it has no int16, and would round every partial sum of 16-bit floats.
_WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.int16: torch.int32}
# Elements divided at a time: stays in the cache, and is below 32768, from which on torch starts threads, which on a
# machine full of ranks costs milliseconds.
_PIECE = (1 << 15) - 64


class PlainCollectives(GroupCollectives):
    """What serves every group, where no provider does; all but messages, which are left to the caller."""

    def __init__(self, group: ProcessGroup, backend: str) -> None:
        self._group = weakref.ref(group)
        self._size, self._rank = group.size(), group.rank()
        self._backend, self._gloo = backend, backend == "gloo"

    def all_reduce(self, tensor: Tensor, op: Any, async_op: bool) -> Any:
        """See `GroupCollectives.all_reduce`."""
        return self._reduced(tensor, op, async_op, lambda wide, op: dist.all_reduce(wide, op, self._live(), True))

    def reduce(self, tensor: Tensor, dst: int, op: Any, async_op: bool) -> Any:
        """See `GroupCollectives.reduce`."""
        group = self._live()
        to = dist.get_global_rank(group, dst)
        return self._reduced(tensor, op, async_op, lambda wide, op: dist.reduce(wide, to, op, group, True))

    def reduce_scatter(self, output: Tensor, input: Tensor, op: Any, async_op: bool) -> Any:
        """See `GroupCollectives.reduce_scatter`; over gloo, which has it only since torch 2.8, an all_reduce."""
        if self._gloo:
            total = input.clone()
            work = self.all_reduce(total, op, True)
            return _end([work], lambda: output.copy_(total.view(self._size, -1)[self._rank]), async_op)
        wire_op, finish = self._average_after(output, op)
        return _end([_SCATTER(output, input, wire_op, self._live(), True)], finish, async_op)

    def all_gather_into(self, output: Tensor, input: Tensor, async_op: bool) -> Any:
        """See `GroupCollectives.all_gather_into`."""
        return _plain(_GATHER(self._wire(output), self._wire(input), self._live(), async_op), async_op)

    def all_gather(self, outputs: Sequence[Tensor], input: Tensor, async_op: bool) -> Any:
        """See `GroupCollectives.all_gather`; gloo gathers equal lengths only, so shorter ones are padded."""
        lengths = [t.numel() for t in outputs]
        if not self._gloo or len(set(lengths)) == 1:
            wired = [self._wire(t) for t in outputs]
            return _plain(dist.all_gather(wired, self._wire(input), self._live(), async_op), async_op)
        padded = input.new_zeros(max(lengths))
        padded[: input.numel()] = input
        rows = input.new_empty(self._size, max(lengths))

        def cut() -> None:
            for output, row, length in zip(outputs, rows.unbind(), lengths, strict=True):
                output.copy_(row[:length])

        return _end([self.all_gather_into(rows.view(-1), padded, True)], cut, async_op)

    def broadcast(self, tensor: Tensor, src: int, async_op: bool) -> Any:
        """See `GroupCollectives.broadcast`."""
        group = self._live()
        return _plain(dist.broadcast(self._wire(tensor), dist.get_global_rank(group, src), group, async_op), async_op)

    def all_to_all(
        self, output: Tensor, input: Tensor, taken: list[int] | None, given: list[int] | None, async_op: bool
    ) -> Any:
        """See `GroupCollectives.all_to_all`."""
        return _plain(dist.all_to_all_single(output, input, taken, given, self._live(), async_op), async_op)

    def _reduced(self, tensor: Tensor, op: Any, async_op: bool, call: Callable[[Tensor, Any], Any]) -> Any:
        wide = tensor.to(_WIDE[tensor.dtype]) if self._gloo and tensor.dtype in _WIDE else tensor
        wire_op, finish = self._average_after(wide, op)
        if wide is tensor:
            return _end([call(tensor, wire_op)], finish, async_op)

        def narrow() -> None:
            if finish is not None:
                finish()
            tensor.copy_(wide)

        return _end([call(wide, wire_op)], narrow, async_op)

    def _average_after(self, tensor: Tensor, op: Any) -> tuple[Any, Callable[[], Any] | None]:
        """The operation to ask the backend for, and what is left to do afterwards."""
        if op != ReduceOp.AVG or self._backend in _AVERAGING:
            return op, None
        return ReduceOp.SUM, lambda: average(tensor, self._size)

    def _wire(self, tensor: Tensor) -> Tensor:
        """What is only moved, as bytes over gloo, which does not know every dtype."""
        return tensor.view(torch.uint8) if self._gloo else tensor

    def _live(self) -> ProcessGroup:
        group = self._group()
        if group is None:
            raise CommError("the process group was destroyed while a collective was started on it")
        return group


def average(total: Tensor, count: int) -> None:
    """Divide `total` in place by the number of ranks; integers towards zero."""
    if total.dtype == torch.bool:
        raise CommError("the average of bool tensors means nothing; reduce with MAX (any) or MIN (all)")
    rounding = None if total.is_floating_point() or total.is_complex() else "trunc"
    if total.device.type != "cpu" or not total.is_contiguous():
        total.div_(count, rounding_mode=rounding)
        return
    for piece in total.view(-1).split(_PIECE):
        piece.div_(count, rounding_mode=rounding)


def _end(works: Sequence[Any], finish: Callable[[], Any] | None, async_op: bool) -> AfterWork | None:
    after = AfterWork(works, finish)
    if async_op:
        return after
    after.wait()
    return None


def _plain(work: Any, async_op: bool) -> Any:
    return work if async_op else None
