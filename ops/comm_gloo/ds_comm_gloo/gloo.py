"""Collectives over gloo on CPU tensors, built from all_to_all and send/recv because that is faster
than gloo's own.

Small buffers go through one all_to_all (one round, in C++); large ones through sends and receives
cut into chunks, so that the scratch space stays in the cache and adding overlaps with the wire.
Which of the two depends only on the number of bytes and of ranks, hence is the same on every rank.

[Note: one meaning] Sums are taken in rank order, ((r0 + r1) + r2) + ..., whatever the algorithm,
size or rank, so the result is bitwise the same on every rank and in every run. Sums and averages of
16-bit floats are accumulated in fp32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from ds_comm_gloo.group_queue import GroupQueue, Messages, QueueWork
from ds_core.comm import AfterWork
from ds_core.comm.providers import average

# Measured 2026-11-21 on 2 cores, other work running (torch 2.13.0; milliseconds, gloo's own ->
# ours, fp32). All of it: `benchmarks/collectives.py`. More than two ranks: buffers (of all ranks
# together) up to this size go through one all_to_all. 4 ranks, 16 KiB: gather 1.6 -> 1.0,
# reduce_scatter 3.0 -> 0.9; from 1 MiB on sends and receives are as fast or faster.
SMALL_BYTES = 1 << 19
# The same for all_reduce, where each rank gets all of every other's buffer: 4 ranks, 256 KiB: 4.9
# -> 2.5.
EXCHANGE_BYTES = 1 << 21
# One message of the chunked algorithms: large, because each costs about 1 ms while the ranks share
# cores. 64 MiB reduce_scatter on 2 ranks: 169 -> 123 with 1 MiB, 56 with 4 MiB, 52 with 8 MiB, 86
# with 16 MiB.
CHUNK_BYTES = 1 << 22
# Two ranks: all_reduce of more than this is gloo's own (which moves as many bytes, and adds in C++
# meanwhile): ours 0.3 -> 0.24 at 64 KiB, but 2.9 -> 5.7 at 4 MiB. On 4 ranks the two are equal in
# fp32 from 4 MiB on (97 -> 97 at 64 MiB); in bf16 ours costs up to twice as much, which buys the
# rounding that this module promises.
PAIR_BYTES = 1 << 17
# Elements added or copied at a time: stays in the cache, and is below 32768, from which on torch
# starts threads, which on a machine full of ranks costs milliseconds.
PIECE = (1 << 15) - 64
# Tags of our messages, out of the way of the small ones people use; one per kind, matched in order
# of issue.
_TAG_GATHER, _TAG_SCATTER, _TAG_SCATTER_ONE, _TAG_PAIR, _TAG_PAIR_ONE, _TAG_REDUCE, _TAG_SPREAD = (
    range(0x44530000, 0x44530007)
)

LOW = (torch.float16, torch.bfloat16)
_Fold = Callable[..., Tensor]
_Post = Callable[[int, "_Scratch"], tuple[list[Tensor], list[Any]]]
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


def all_gather(
    whole: Tensor, mine: Tensor, queue: GroupQueue, async_op: bool
) -> AfterWork | QueueWork | None:
    """Fill `whole`, n times as long, with every rank's `mine`, which may lie in its place already;
    flat tensors.
    """
    if mine.numel() == 0:
        return AfterWork(()) if async_op else None
    if queue.size > 2 and whole.nbytes <= SMALL_BYTES:
        return _finish(AfterWork([queue.exchange(whole, _repeat(mine, queue.size))]), async_op)
    parts = whole.view(queue.size, -1).unbind()
    tag = queue.tag(_TAG_GATHER)
    works = [queue.recv(parts[i], i, tag) for i in queue.peers()]
    works += [queue.send(mine, i, tag) for i in queue.peers()]
    if parts[queue.rank].data_ptr() != mine.data_ptr():
        copy(parts[queue.rank], mine)
    return _finish(AfterWork([Messages(works)]), async_op)


def reduce_scatter(
    output: Tensor, input: Tensor, op: Any, queue: GroupQueue, async_op: bool
) -> AfterWork | QueueWork | None:
    """Fill `output` (k elements) with this rank's k of the reduced `input` (n * k); flat contiguous
    tensors.
    """
    if input.numel() == 0:
        return AfterWork(()) if async_op else None
    rows = input.view(queue.size, -1).unbind()
    if queue.size > 2 and input.numel() * input.element_size() <= SMALL_BYTES:
        arrived = torch.empty_like(input)
        work = queue.exchange(arrived, input)
        parts = arrived.view(queue.size, -1).unbind()
        return _finish(AfterWork([work], lambda: reduce_parts(output, parts, op)), async_op)

    spans = list(cut(output.numel(), CHUNK_BYTES // output.element_size()))
    tag = queue.tag(_TAG_SCATTER if len(spans) > 1 else _TAG_SCATTER_ONE)

    def post(index: int, scratch: _Scratch) -> tuple[list[Tensor], list[Any]]:
        begin, end = spans[index]
        parts = scratch.parts(index, rows[queue.rank][begin:end])
        works = [queue.recv(parts[i], i, tag) for i in queue.peers()]
        return parts, works + [queue.send(rows[i][begin:end], i, tag) for i in queue.peers()]

    def add(index: int, parts: list[Tensor]) -> None:
        reduce_parts(output[slice(*spans[index])], parts, op)

    return _rounds(
        len(spans), post, add, _Scratch(output, spans[0][1], queue, len(spans)), queue, async_op
    )


def all_reduce(
    flat: Tensor, op: Any, queue: GroupQueue, async_op: bool
) -> AfterWork | QueueWork | None:
    """Replace `flat` (flat contiguous) by its reduction over the ranks."""
    size = flat.numel() * flat.element_size()
    if size == 0:
        return AfterWork(()) if async_op else None
    if queue.size == 2:
        if size > PAIR_BYTES and _adds_alike(flat.dtype, op, 2) and not queue.tagged:
            work = dist.all_reduce(flat, ReduceOp.SUM, queue.group, async_op=True)
            return _finish(
                AfterWork([work], (lambda: average(flat, 2)) if op == ReduceOp.AVG else None),
                async_op,
            )
        return _all_reduce_pair(flat, op, queue, async_op)
    if size * queue.size <= EXCHANGE_BYTES:
        arrived = flat.new_empty(queue.size, flat.numel())
        work = queue.exchange(arrived.view(-1), _repeat(flat, queue.size))
        return _finish(
            AfterWork([work], lambda: reduce_parts(flat, arrived.unbind(), op)), async_op
        )
    reducing = queue.tag(_TAG_REDUCE)
    spreading = queue.tag(_TAG_SPREAD)
    return queue.run(
        lambda: _all_reduce_blocks(flat, op, queue, reducing, spreading),
        async_op,
        flat.is_inference(),
    )


def _adds_alike(dtype: torch.dtype, op: Any, ranks: int) -> bool:
    """Whether adding in `dtype` itself, dividing afterwards, gives what `reduce_parts` promises.

    A sum of two is rounded once either way. Halving it is exact in bf16, whose range is that of
    fp32; in fp16 the sum could overflow where the average does not.
    """
    if ranks == 2 and dtype != torch.bool:
        return op == ReduceOp.SUM or (op == ReduceOp.AVG and dtype != torch.float16)
    return False


def _all_reduce_pair(
    flat: Tensor, op: Any, queue: GroupQueue, async_op: bool
) -> AfterWork | QueueWork | None:
    """Two ranks: each sends all it has and adds all that comes; as many bytes as any way, in one
    round.
    """
    spans = list(cut(flat.numel(), CHUNK_BYTES // flat.element_size()))
    tag = queue.tag(_TAG_PAIR if len(spans) > 1 else _TAG_PAIR_ONE)
    (peer,) = queue.peers()

    def post(index: int, scratch: _Scratch) -> tuple[list[Tensor], list[Any]]:
        mine = flat[slice(*spans[index])]
        parts = scratch.parts(index, mine)
        return parts, [queue.recv(parts[peer], peer, tag), queue.send(mine, peer, tag)]

    def add(index: int, parts: list[Tensor]) -> None:
        reduce_parts(parts[queue.rank], parts, op)

    return _rounds(
        len(spans), post, add, _Scratch(flat, spans[0][1], queue, len(spans)), queue, async_op
    )


def _all_reduce_blocks(
    flat: Tensor, op: Any, queue: GroupQueue, reduce_tag: int, spread_tag: int
) -> None:
    """More ranks: block by block, each rank reduces its part and sends it to all."""
    step = CHUNK_BYTES // flat.element_size() * queue.size
    blocks = [flat[begin:end].tensor_split(queue.size) for begin, end in cut(flat.numel(), step)]
    spreading: list[Any] = []

    def post(index: int, scratch: _Scratch) -> tuple[list[Tensor], list[Any]]:
        block = blocks[index]
        parts = scratch.parts(index, block[queue.rank])
        works = [queue.recv(parts[i], i, reduce_tag) for i in queue.peers() if len(parts[i])]
        works += [queue.send(block[i], i, reduce_tag) for i in queue.peers() if len(block[i])]
        return parts, works

    def add(index: int, parts: list[Tensor]) -> None:
        block = blocks[index]
        mine = parts[queue.rank]
        reduce_parts(mine, parts, op)
        spreading.extend(
            queue.recv(block[i], i, spread_tag) for i in queue.peers() if len(block[i])
        )
        spreading.extend(queue.send(mine, i, spread_tag) for i in queue.peers() if len(mine))

    _pipeline(len(blocks), post, add, _Scratch(flat, len(blocks[0][0]), queue, len(blocks)))
    _wait_all(spreading)


class _Scratch:
    """Up to two buffers per other rank: one is being filled while the other is being added."""

    def __init__(self, like: Tensor, length: int, queue: GroupQueue, rounds: int) -> None:
        self._rank = queue.rank
        self.inference = like.is_inference()
        self._rows = like.new_empty(min(rounds, 2), queue.size - 1, length).unbind()

    def parts(self, index: int, mine: Tensor) -> list[Tensor]:
        """One tensor like `mine` per rank, this rank's being `mine` itself, for round `index`."""
        parts = [row[: len(mine)] for row in self._rows[index % 2].unbind()]
        parts.insert(self._rank, mine)
        return parts


def _rounds(
    rounds: int,
    post: _Post,
    add: Callable[[int, list[Tensor]], None],
    scratch: _Scratch,
    queue: GroupQueue,
    async_op: bool,
) -> AfterWork | QueueWork | None:
    """Run all rounds; a single one is under way at once, so that only its adding is left for
    wait."""
    if rounds > 1:
        return queue.run(lambda: _pipeline(rounds, post, add, scratch), async_op, scratch.inference)
    parts, works = post(0, scratch)
    return _finish(AfterWork([Messages(works)], lambda: add(0, parts)), async_op)


def _pipeline(
    rounds: int, post: _Post, add: Callable[[int, list[Tensor]], None], scratch: _Scratch
) -> None:
    """Run `post` (start a round's messages), then `add` when they are there, with the next round
    under way.
    """
    coming = post(0, scratch)
    for index in range(rounds):
        parts, works = coming
        if index + 1 < rounds:
            coming = post(index + 1, scratch)
        _wait_all(works)
        add(index, parts)


def reduce_parts(out: Tensor, parts: Sequence[Tensor], op: Any) -> None:
    """Write the reduction of `parts`, one per rank in rank order, into `out`, which may be one of
    them.

    The other parts stay as they are. Averages of integers are rounded towards zero.
    """
    fold = FOLDS[op]
    widen = (
        out.dtype in LOW
        and fold in (torch.add, torch.mul)
        and not _adds_alike(out.dtype, op, len(parts))
    )
    wide = torch.empty(2, min(PIECE, out.numel()), dtype=torch.float32).unbind() if widen else ()
    for begin, end in cut(out.numel(), PIECE):
        pieces = [p[begin:end] for p in parts]
        if widen:
            _reduce_wide(out[begin:end], pieces, op, *(w[: end - begin] for w in wide))
        else:
            _reduce_piece(out[begin:end], pieces, op)


def _reduce_piece(out: Tensor, parts: Sequence[Tensor], op: Any) -> None:
    fold = FOLDS[op]
    total = parts[0]
    for part in parts[1:-1]:
        total = fold(total, part)
    fold(total, parts[-1], out=out)  # only the last may overwrite, as `out` may be any of the parts
    if op == ReduceOp.AVG:
        average(out, len(parts))


def _reduce_wide(
    out: Tensor, parts: Sequence[Tensor], op: Any, total: Tensor, next_part: Tensor
) -> None:
    """In fp32. Copying first is a third faster than adding tensors of two dtypes."""
    total.copy_(parts[0])
    for part in parts[1:]:
        FOLDS[op](total, next_part.copy_(part), out=total)
    out.copy_(total.div_(len(parts)) if op == ReduceOp.AVG else total)


def _repeat(tensor: Tensor, times: int) -> Tensor:
    """`tensor` `times` times in a row, without torch's threads."""
    rows = tensor.new_empty(times, tensor.numel())
    for row in rows.unbind():
        copy(row, tensor)
    return rows.view(-1)


def _finish(work: AfterWork, async_op: bool) -> AfterWork | None:
    if async_op:
        return work
    work.wait()
    return None


def copy(target: Tensor, source: Tensor) -> None:
    """Copy, converting the dtype, without torch's threads."""
    for begin, end in cut(target.numel(), PIECE):
        target[begin:end].copy_(source[begin:end])


def _wait_all(works: Sequence[Any]) -> None:
    for work in works:
        work.wait()


def cut(total: int, step: int) -> Iterator[tuple[int, int]]:
    """Beginnings and ends of the pieces of `total` elements, each of `step` but the last."""
    return ((begin, min(begin + step, total)) for begin in range(0, total, step))
