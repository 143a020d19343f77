"""Collectives over gloo on CPU tensors, built from all_to_all and send/recv because that is faster than gloo's own.

Small buffers go through one all_to_all (one round, in C++); large ones through sends and receives cut into chunks, so
that the scratch space stays in the cache and adding overlaps with the wire. Which of the two depends only on the
number of bytes and of ranks, hence is the same on every rank.

[Note: one meaning] Sums are taken in rank order, ((r0 + r1) + r2) + ..., whatever the algorithm, size or rank, so the
result is bitwise the same on every rank and in every run. Sums and averages of 16-bit floats are accumulated in fp32
and rounded once.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from ds_core.errors import CommError

__all__ = ["FOLDS", "AfterWork", "Lane", "LaneWork", "all_gather_parts", "all_reduce", "reduce_scatter"]

# A buffer (of all ranks together) up to this many bytes goes through one all_to_all.
SMALL_BYTES = 1 << 19
# One message of the chunked algorithms.
CHUNK_BYTES = 1 << 20
# Elements added or copied at a time: stays in the cache, and is below 32768, from which on torch starts threads, which
# on a machine full of ranks costs milliseconds.
PIECE = (1 << 15) - 64
# Tags of our messages, out of the way of the small ones people use; one per kind, matched in order of issue.
_TAG_GATHER, _TAG_SCATTER, _TAG_REDUCE, _TAG_SPREAD = range(0x44530000, 0x44530004)

_LOW = (torch.float16, torch.bfloat16)
_Fold = Callable[..., Tensor]
FOLDS: dict[Any, _Fold] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.AVG: torch.add,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}


class AfterWork:
    """A running collective and what is left to do here when it has arrived; done once, by wait or is_completed."""

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
        """Whether the result is in its tensor; adds up what has fully arrived."""
        return all(work.is_completed() for work in self._works) and self.wait()


class LaneWork:
    """A collective that runs on its group's lane."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the result is in its tensor. Raises what the collective raised."""
        try:
            self._future.result(None if timeout is None else timeout.total_seconds())
        except TimeoutError:
            raise CommError(f"a collective did not finish within {timeout}") from None
        return True

    def is_completed(self) -> bool:
        """Whether the collective has ended, well or not; wait tells which."""
        return self._future.done()


class Lane:
    """What we keep per group: its size, this rank's place in it, and the order of its long collectives.

    Chunked collectives of one group run one after the other in the order in which they were called, on every rank;
    asynchronous ones on a thread of their own. It is a daemon, so a rank that fails can end while its peers hang.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = weakref.ref(group)  # the lane is kept for as long as its group lives, and must not keep it
        self.size, self.rank = group.size(), group.rank()
        self._jobs: queue.SimpleQueue[tuple[Callable[[], None], bool, Future[None]]] = queue.SimpleQueue()
        self._last: Future[None] | None = None
        self._started = False

    def run(self, job: Callable[[], None], async_op: bool, inference: bool) -> LaneWork | None:
        """Run `job` after all that was called before it; on the lane's thread if `async_op`."""
        if not async_op:
            if self._last is not None:
                self._last.exception()  # only its end matters here; its own wait() raises
                self._last = None
            with torch.no_grad():
                job()
            return None
        if not self._started:
            threading.Thread(target=_serve, args=(self._jobs,), name="ds_core.comm lane", daemon=True).start()
            self._started = True
        self._last = future = Future[None]()
        self._jobs.put((job, inference, future))
        return LaneWork(future)

    @property
    def group(self) -> ProcessGroup:
        """The group, which must not have been destroyed."""
        group = self._group()
        if group is None:
            raise CommError("the process group was destroyed while a collective ran on it; wait for its work first")
        return group

    def peers(self) -> list[int]:
        """The other ranks, each rank starting at its right neighbour, so that not all send to one at once."""
        return [(self.rank + d) % self.size for d in range(1, self.size)]

    def send(self, tensor: Tensor, to: int, tag: int) -> Any:
        """Start sending a flat tensor; it must stay as it is until the work is done."""
        return self.group.send([tensor.view(torch.uint8)], to, tag)

    def recv(self, tensor: Tensor, source: int, tag: int) -> Any:
        """Start receiving into a flat tensor."""
        return self.group.recv([tensor.view(torch.uint8)], source, tag)

    def exchange(self, output: Tensor, input: Tensor, received: list[int] | None = None, sent: list[int] | None = None) -> Any:
        """Start an all_to_all of flat tensors; sizes in elements, equal when None."""
        width = output.element_size()
        out_bytes = None if received is None else [n * width for n in received]
        in_bytes = None if sent is None else [n * width for n in sent]
        raw = (output.view(torch.uint8), input.view(torch.uint8))
        return dist.all_to_all_single(*raw, out_bytes, in_bytes, group=self.group, async_op=True)


def _serve(jobs: queue.SimpleQueue[tuple[Callable[[], None], bool, Future[None]]]) -> None:
    while True:
        job, inference, future = jobs.get()
        try:
            with torch.inference_mode(inference), torch.no_grad():  # both are per thread
                job()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(None)
        del job, future  # the tensors of the last job must not live until the next one


def all_gather_parts(
    parts: Sequence[Tensor], mine: Tensor, lane: Lane, async_op: bool, whole: Tensor | None = None
) -> AfterWork | LaneWork | None:
    """Fill `parts[i]` with rank i's `mine`; flat contiguous tensors, possibly of different lengths (or empty).

    whole: the tensor of which `parts` are the equal pieces, if there is one.
    """
    sizes = [p.numel() for p in parts]
    total = sum(sizes)
    if total == 0:
        return AfterWork(()) if async_op else None
    if lane.size > 2 and total * mine.element_size() <= SMALL_BYTES:
        arrived = torch.empty(total, dtype=mine.dtype) if whole is None else whole
        even = None if len(set(sizes)) == 1 else sizes
        work = lane.exchange(arrived, mine.repeat(lane.size), even, even and [mine.numel()] * lane.size)
        deal = (lambda: _copy_all(parts, arrived.split(sizes))) if whole is None else None
        return _settle(AfterWork([work], deal), async_op)

    def spread() -> None:
        works = [lane.recv(parts[i], i, _TAG_GATHER) for i in lane.peers() if sizes[i]]
        works += [lane.send(mine, i, _TAG_GATHER) for i in lane.peers() if mine.numel()]
        if parts[lane.rank].data_ptr() != mine.data_ptr():
            _copy(parts[lane.rank], mine)
        _wait_all(works)

    return lane.run(spread, async_op, parts[0].is_inference())


def reduce_scatter(output: Tensor, input: Tensor, op: Any, lane: Lane, async_op: bool) -> AfterWork | LaneWork | None:
    """Fill `output` (k elements) with this rank's k of the reduced `input` (n * k); flat contiguous tensors."""
    if input.numel() == 0:
        return AfterWork(()) if async_op else None
    rows = input.view(lane.size, -1).unbind()
    if lane.size > 2 and input.numel() * input.element_size() <= SMALL_BYTES:
        arrived = torch.empty_like(input)
        work = lane.exchange(arrived, input)
        parts = arrived.view(lane.size, -1).unbind()
        return _settle(AfterWork([work], lambda: reduce_parts(output, parts, op)), async_op)

    def stream() -> None:
        spans = list(_spans(output.numel(), CHUNK_BYTES // output.element_size()))
        scratch = _Scratch(output, lane, spans[0][1])

        def post(index: int) -> tuple[list[Tensor], list[Any]]:
            begin, end = spans[index]
            parts = scratch.parts(index, rows[lane.rank][begin:end])
            works = [lane.recv(parts[i], i, _TAG_SCATTER) for i in lane.peers()]
            works += [lane.send(rows[i][begin:end], i, _TAG_SCATTER) for i in lane.peers()]
            return parts, works

        def add(index: int, parts: list[Tensor]) -> None:
            reduce_parts(output[slice(*spans[index])], parts, op)

        _pipeline(len(spans), post, add)

    return lane.run(stream, async_op, output.is_inference())


def all_reduce(flat: Tensor, op: Any, lane: Lane, async_op: bool) -> AfterWork | LaneWork | None:
    """Replace `flat` (flat contiguous) by its reduction over the ranks."""
    if flat.numel() == 0:
        return AfterWork(()) if async_op else None
    if lane.size == 2:
        return lane.run(lambda: _all_reduce_pair(flat, op, lane), async_op, flat.is_inference())
    if flat.numel() * flat.element_size() * lane.size <= SMALL_BYTES:
        arrived = flat.new_empty(lane.size, flat.numel())
        work = lane.exchange(arrived.view(-1), flat.repeat(lane.size))
        return _settle(AfterWork([work], lambda: reduce_parts(flat, arrived.unbind(), op)), async_op)
    return lane.run(lambda: _all_reduce_blocks(flat, op, lane), async_op, flat.is_inference())


def _all_reduce_pair(flat: Tensor, op: Any, lane: Lane) -> None:
    """Two ranks: each sends all it has and adds all that comes; as many bytes as any way, in one round."""
    spans = list(_spans(flat.numel(), CHUNK_BYTES // flat.element_size()))
    scratch, (peer,) = _Scratch(flat, lane, spans[0][1]), lane.peers()

    def post(index: int) -> tuple[list[Tensor], list[Any]]:
        mine = flat[slice(*spans[index])]
        parts = scratch.parts(index, mine)
        return parts, [lane.recv(parts[peer], peer, _TAG_REDUCE), lane.send(mine, peer, _TAG_REDUCE)]

    def add(index: int, parts: list[Tensor]) -> None:
        reduce_parts(parts[lane.rank], parts, op)

    _pipeline(len(spans), post, add)


def _all_reduce_blocks(flat: Tensor, op: Any, lane: Lane) -> None:
    """More ranks: block by block, each rank reduces its part and sends it to all."""
    step = CHUNK_BYTES // flat.element_size() * lane.size
    blocks = [flat[begin:end].tensor_split(lane.size) for begin, end in _spans(flat.numel(), step)]
    scratch = _Scratch(flat, lane, len(blocks[0][0]))
    spreading: list[Any] = []

    def post(index: int) -> tuple[list[Tensor], list[Any]]:
        block = blocks[index]
        parts = scratch.parts(index, block[lane.rank])
        works = [lane.recv(parts[i], i, _TAG_REDUCE) for i in lane.peers() if len(parts[i])]
        works += [lane.send(block[i], i, _TAG_REDUCE) for i in lane.peers() if len(block[i])]
        return parts, works

    def add(index: int, parts: list[Tensor]) -> None:
        block, mine = blocks[index], parts[lane.rank]
        reduce_parts(mine, parts, op)
        spreading.extend(lane.recv(block[i], i, _TAG_SPREAD) for i in lane.peers() if len(block[i]))
        spreading.extend(lane.send(mine, i, _TAG_SPREAD) for i in lane.peers() if len(mine))

    _pipeline(len(blocks), post, add)
    _wait_all(spreading)


class _Scratch:
    """Two buffers per other rank: one is being filled while the other is being added."""

    def __init__(self, like: Tensor, lane: Lane, length: int) -> None:
        self._rank = lane.rank
        self._rows = like.new_empty(2, lane.size - 1, length).unbind()

    def parts(self, index: int, mine: Tensor) -> list[Tensor]:
        """One tensor like `mine` per rank, this rank's being `mine` itself, for round `index`."""
        parts = [row[: len(mine)] for row in self._rows[index % 2].unbind()]
        parts.insert(self._rank, mine)
        return parts


def _pipeline(
    rounds: int, post: Callable[[int], tuple[list[Tensor], list[Any]]], add: Callable[[int, list[Tensor]], None]
) -> None:
    """Run `post` (start a round's messages), then `add` when they are there, with the next round under way."""
    coming = post(0)
    for index in range(rounds):
        parts, works = coming
        if index + 1 < rounds:
            coming = post(index + 1)
        _wait_all(works)
        add(index, parts)


def reduce_parts(out: Tensor, parts: Sequence[Tensor], op: Any) -> None:
    """Write the reduction of `parts`, one per rank in rank order, into `out`, which may be one of them.

    The other parts stay as they are. Averages of integers are rounded towards zero.
    """
    for begin, end in _spans(out.numel(), PIECE):
        _reduce_piece(out[begin:end], [p[begin:end] for p in parts], op)


def _reduce_piece(out: Tensor, parts: Sequence[Tensor], op: Any) -> None:
    fold = FOLDS[op]
    if out.dtype in _LOW and fold is not torch.maximum and fold is not torch.minimum:
        total = parts[0].float()
        for part in parts[1:]:
            fold(total, part.float(), out=total)
        out.copy_(average(total, len(parts)) if op == ReduceOp.AVG else total)
        return
    total = parts[0]
    for part in parts[1:-1]:
        total = fold(total, part)
    fold(total, parts[-1], out=out)  # only the last may overwrite, as `out` may be any of the parts
    if op == ReduceOp.AVG:
        average(out, len(parts))


def average(total: Tensor, count: int) -> Tensor:
    """Divide `total` in place by the number of ranks; integers towards zero."""
    if total.is_floating_point() or total.is_complex():
        return total.div_(count)
    if total.dtype == torch.bool:
        raise CommError("the average of bool tensors means nothing; reduce with MAX (any) or MIN (all)")
    return total.div_(count, rounding_mode="trunc")


def _settle(work: AfterWork, async_op: bool) -> AfterWork | None:
    if async_op:
        return work
    work.wait()
    return None


def _copy(target: Tensor, source: Tensor) -> None:
    for begin, end in _spans(target.numel(), PIECE):
        target[begin:end].copy_(source[begin:end])


def _copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        _copy(target, source)


def _wait_all(works: Sequence[Any]) -> None:
    for work in works:
        work.wait()


def _spans(total: int, step: int) -> Iterator[tuple[int, int]]:
    return ((begin, min(begin + step, total)) for begin in range(0, total, step))
