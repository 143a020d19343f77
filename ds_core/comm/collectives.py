"""The collectives everything else calls: torch.distributed's signatures, the best algorithm for each backend.

At one rank (or with no process group) nothing is called at all. Over gloo, CPU tensors take the algorithms of
`ds_core.comm.gloo`, or of `ds_core.comm.shared` where an installed kernel serves; every other backend goes straight to
torch.distributed. AVG works on all of them.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, ParamSpec, Protocol, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from ds_core.comm import ALONE, gloo, interceptor, shared
from ds_core.comm.lane import AfterWork, Lane, Messages
from ds_core.errors import CommError

__all__ = [
    "Work",
    "all_gather",
    "all_gather_into_tensor",
    "all_reduce",
    "all_to_all_single",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "gather",
    "irecv",
    "isend",
    "open_transports",
    "rank",
    "recv",
    "reduce",
    "reduce_scatter_tensor",
    "scatter",
    "send",
    "world_size",
]

P = ParamSpec("P")
R = TypeVar("R")
# Backends that average by themselves; the others are given a sum, which is then divided.
_AVERAGING = ("nccl", "xccl")
# torch 2.13 renamed these two and warns about the old names.
_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
# What is kept per live process group; it goes with the group.
_lanes: WeakKeyDictionary[ProcessGroup, tuple[Lane | None, str]] = WeakKeyDictionary()


class Work(Protocol):
    """A collective under way, as `async_op=True` returns it."""

    def wait(self, timeout: timedelta = ...) -> Any:
        """Block until the result is in its tensor."""

    def is_completed(self) -> bool:
        """Whether it is."""


def world_size(group: ProcessGroup | None = None) -> int:
    """The number of ranks in `group` (None: all); 1 when no process group runs."""
    if group is ALONE:
        return 1
    return dist.get_world_size(group) if dist.is_initialized() else 1


def rank(group: ProcessGroup | None = None) -> int:
    """This process's place in `group` (None: all); 0 when no process group runs."""
    if group is ALONE:
        return 0
    return dist.get_rank(group) if dist.is_initialized() else 0


def members(group: ProcessGroup | None) -> int:
    """`world_size`, for a call that only members may make."""
    size = world_size(group)
    if size < 1:  # torch's answer for the others
        raise CommError(f"rank {rank()} is not in the group it called a collective on; only its members may call")
    return size


def _intercepted(function: Callable[P, R]) -> Callable[P, R]:
    """Let the installed interceptors see each call of `function` among several ranks; one `if` when there are none."""
    op, signature = function.__name__, inspect.signature(function).parameters
    parameters = {p.name: (i, None if p.default is p.empty else p.default) for i, p in enumerate(signature.values())}
    at = parameters["group"][0]

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not interceptor.installed:
            return function(*args, **kwargs)
        group = args[at] if len(args) > at else kwargs.get("group")
        if group is None:
            group = dist.group.WORLD
        if not isinstance(group, ProcessGroup) or group.size() == 1:
            interceptor.label("")
            return function(*args, **kwargs)
        made = interceptor.Collective(op, group, parameters, args, kwargs)
        return cast(R, interceptor.intercept(made, functools.partial(function, *args, **kwargs)))

    return call


@_intercepted
def all_reduce(
    tensor: Tensor, op: Any = ReduceOp.SUM, group: ProcessGroup | None = None, async_op: bool = False
) -> Work | None:
    """Replace `tensor`, on every rank, by the reduction over all ranks; the same bits everywhere."""
    if (size := members(group)) == 1:
        return _nothing(async_op)
    lane, backend = _route(group, tensor)
    if lane is None or op not in gloo.FOLDS:
        work = dist.all_reduce(tensor, _wire_op(op, backend), group, async_op=True)
        return _end(work, _averager(tensor, op, backend, size), async_op)
    flat, back = _flat(tensor)
    way = shared if shared.serves(lane, "all_reduce", flat.nbytes, flat.dtype, op, async_op=async_op) else gloo
    return _after(way.all_reduce(flat, op, lane, async_op), back, async_op)


@_intercepted
def reduce(
    tensor: Tensor, dst: int, op: Any = ReduceOp.SUM, group: ProcessGroup | None = None, async_op: bool = False
) -> Work | None:
    """Reduce into `tensor` of global rank `dst`; elsewhere its content is undefined afterwards."""
    if (size := members(group)) == 1:
        return _nothing(async_op)
    _, backend = _route(group, tensor)
    work = dist.reduce(tensor, dst, _wire_op(op, backend), group, async_op=True)
    return _end(work, _averager(tensor, op, backend, size), async_op)


@_intercepted
def broadcast(tensor: Tensor, src: int, group: ProcessGroup | None = None, async_op: bool = False) -> Work | None:
    """Replace `tensor`, on every rank, by that of global rank `src`."""
    if members(group) == 1 or tensor.numel() == 0:
        return _nothing(async_op)
    lane, _ = _route(group, tensor)
    if lane is None or not shared.serves(lane, "all_gather", tensor.nbytes, tensor.dtype, async_op=async_op):
        return _plain(dist.broadcast(tensor, src, group, async_op), async_op)
    flat, back = _flat(tensor)
    return _after(shared.broadcast(flat, _place(group, src), lane, async_op), back, async_op)


@_intercepted
def all_gather_into_tensor(
    output: Tensor, input: Tensor, group: ProcessGroup | None = None, async_op: bool = False
) -> Work | None:
    """Fill `output` (n times as long, any shape) with every rank's `input`, in rank order."""
    size = members(group)
    _check_lengths("all_gather_into_tensor", "output", output, "input", input, size)
    if size == 1:
        output.detach().view(-1).copy_(input.detach().reshape(-1))
        return _nothing(async_op)
    lane, _ = _route(group, output)
    if lane is None:
        return _plain(_GATHER(output, input, group, async_op), async_op)
    flat, back = _flat(output, fill=False)
    mine, _ = _flat(input)
    way = shared if shared.serves(lane, "all_gather", flat.nbytes, flat.dtype, async_op=async_op) else gloo
    return _after(way.all_gather_parts(flat.view(size, -1).unbind(), mine, lane, async_op, flat), back, async_op)


@_intercepted
def all_gather(
    tensor_list: Sequence[Tensor], tensor: Tensor, group: ProcessGroup | None = None, async_op: bool = False
) -> Work | None:
    """Fill `tensor_list[i]` with rank i's `tensor`. Over gloo the lengths may differ between ranks, or be 0."""
    size = members(group)
    if len(tensor_list) != size:
        raise CommError(f"all_gather over {size} ranks was given {len(tensor_list)} tensors to fill; give {size}")
    if size == 1:
        tensor_list[0].detach().copy_(tensor.detach())
        return _nothing(async_op)
    lane, _ = _route(group, tensor)
    if lane is None:
        return _plain(dist.all_gather(list(tensor_list), tensor, group, async_op), async_op)
    if tensor_list[lane.rank].numel() != tensor.numel():
        raise CommError(
            f"all_gather: tensor_list[{lane.rank}] has {tensor_list[lane.rank].numel()} elements, "
            f"this rank's tensor {tensor.numel()}; they must be equal"
        )
    pairs = [_flat(t, fill=False) for t in tensor_list]
    mine, _ = _flat(tensor)
    backs = [back for _, back in pairs if back is not None]
    finish = (lambda: [back() for back in backs]) if backs else None
    total = sum(t.nbytes for t in tensor_list)
    way = shared if shared.serves(lane, "all_gather", total, mine.dtype, async_op=async_op) else gloo
    return _after(way.all_gather_parts([flat for flat, _ in pairs], mine, lane, async_op), finish, async_op)


@_intercepted
def reduce_scatter_tensor(
    output: Tensor, input: Tensor, op: Any = ReduceOp.SUM, group: ProcessGroup | None = None, async_op: bool = False
) -> Work | None:
    """Fill `output` with this rank's n-th part of the reduction of `input` (n times as long, any shape)."""
    size = members(group)
    _check_lengths("reduce_scatter_tensor", "input", input, "output", output, size)
    if size == 1:
        output.detach().view(-1).copy_(input.detach().reshape(-1))
        return _nothing(async_op)
    lane, backend = _route(group, output)
    if lane is None or op not in gloo.FOLDS:
        work = _SCATTER(output, input, _wire_op(op, backend), group, True)
        return _end(work, _averager(output, op, backend, size), async_op)
    flat, back = _flat(output, fill=False)
    whole, _ = _flat(input)
    way = shared if shared.serves(lane, "reduce_scatter", whole.nbytes, whole.dtype, op, async_op=async_op) else gloo
    return _after(way.reduce_scatter(flat, whole, op, lane, async_op), back, async_op)


@_intercepted
def all_to_all_single(
    output: Tensor,
    input: Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Send the i-th part of `input` (along dim 0) to rank i; `output` takes the parts that come, in rank order."""
    if members(group) == 1:
        output.detach().copy_(input.detach())
        return _nothing(async_op)
    lane, _ = _route(group, output)
    if lane is not None and shared.exchanges(lane, async_op=async_op):
        if output.dtype != input.dtype:
            raise CommError(f"all_to_all_single: output is {output.dtype}, input {input.dtype}; they must be equal")
        flat, back = _flat(output, fill=False)
        taken = _parts(output, flat, output_split_sizes, lane)
        given = _parts(input, _flat(input)[0], input_split_sizes, lane)
        return _end(shared.all_to_all(taken, given, lane), back, async_op)
    out_sizes = None if output_split_sizes is None else list(output_split_sizes)
    in_sizes = None if input_split_sizes is None else list(input_split_sizes)
    return _plain(dist.all_to_all_single(output, input, out_sizes, in_sizes, group, async_op), async_op)


@_intercepted
def gather(
    tensor: Tensor,
    gather_list: Sequence[Tensor] | None = None,
    dst: int = 0,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Fill `gather_list[i]` of global rank `dst` with rank i's `tensor`; the others give None."""
    if members(group) == 1:
        if gather_list:
            gather_list[0].detach().copy_(tensor.detach())
        return _nothing(async_op)
    return _plain(
        dist.gather(tensor, None if gather_list is None else list(gather_list), dst, group, async_op), async_op
    )


@_intercepted
def scatter(
    tensor: Tensor,
    scatter_list: Sequence[Tensor] | None = None,
    src: int = 0,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Fill rank i's `tensor` with `scatter_list[i]` of global rank `src`; the others give None."""
    if members(group) == 1:
        if scatter_list:
            tensor.detach().copy_(scatter_list[0].detach())
        return _nothing(async_op)
    return _plain(
        dist.scatter(tensor, None if scatter_list is None else list(scatter_list), src, group, async_op), async_op
    )


@_intercepted
def send(tensor: Tensor, dst: int, group: ProcessGroup | None = None, tag: int = 0) -> None:
    """Send `tensor` to global rank `dst`; returns when it may be changed again.

    To be received by this module's `recv` or `irecv`, not by torch.distributed's: they may look elsewhere.
    """
    members(group)
    if (post := _post(group, tensor, dst, tag)) is None:
        dist.send(tensor, dst, group, tag)
    else:
        post.isend(_flat(tensor)[0], _place(group, dst)).wait()


@_intercepted
def recv(tensor: Tensor, src: int | None = None, group: ProcessGroup | None = None, tag: int = 0) -> int:
    """Receive into `tensor` from global rank `src` (None: whoever sends); returns the sender."""
    members(group)
    if (post := _post(group, tensor, src, tag)) is None:
        return dist.recv(tensor, src, group, tag)
    flat, back = _flat(tensor, fill=False)
    work = post.irecv(flat, None if src is None else _place(group, src))
    AfterWork([work], back).wait()
    return dist.get_global_rank(_live(group), work.source)


@_intercepted
def isend(tensor: Tensor, dst: int, group: ProcessGroup | None = None, tag: int = 0) -> Work:
    """Start sending `tensor` to global rank `dst`; it must stay as it is until the work is done."""
    members(group)
    if (post := _post(group, tensor, dst, tag)) is None:
        return _message(dist.isend(tensor, dst, group, tag), group, tensor)
    return cast(Work, post.isend(_flat(tensor)[0], _place(group, dst)))


@_intercepted
def irecv(tensor: Tensor, src: int | None = None, group: ProcessGroup | None = None, tag: int = 0) -> Work:
    """Start receiving into `tensor` from global rank `src` (None: whoever sends)."""
    members(group)
    if (post := _post(group, tensor, src, tag)) is None:
        return _message(dist.irecv(tensor, src, group, tag), group, tensor)
    flat, back = _flat(tensor, fill=False)
    return cast(Work, _after(post.irecv(flat, None if src is None else _place(group, src)), back, True))


def batch_isend_irecv(
    operations: Sequence[tuple[Callable[..., Work], Tensor, int]], group: ProcessGroup | None = None
) -> list[Work]:
    """Start several sends and receives together: ``[(comm.isend, tensor, dst), (comm.irecv, tensor, src), ...]``.

    Backends that need it (nccl) get them as one launch, so that pairs of ranks cannot block each other.
    """
    kinds = {isend: dist.isend, irecv: dist.irecv}
    if unknown := [f for f, _, _ in operations if f not in kinds]:
        raise CommError(f"batch_isend_irecv takes ds_core.comm.isend and irecv, not {unknown[0]!r}")
    if not operations:
        return []
    if interceptor.installed or _route(group, operations[0][1])[0] is not None:
        return [function(tensor, peer, group) for function, tensor, peer in operations]
    batch = [dist.P2POp(kinds[function], tensor, peer, group) for function, tensor, peer in operations]
    works = dist.batch_isend_irecv(batch)
    return [_message(work, group, operations[0][1]) for work in works]


@_intercepted
def barrier(group: ProcessGroup | None = None, async_op: bool = False) -> Work | None:
    """Return when every rank of `group` has called it."""
    if members(group) == 1:
        return _nothing(async_op)
    return _plain(dist.barrier(group, async_op), async_op)


def open_transports(groups: Iterable[ProcessGroup]) -> None:
    """Open the transports of `groups` now. Collective over each: ranks give their groups in one order."""
    nothing = torch.empty(0)
    for group in groups:
        if group is ALONE:
            continue
        lane, _ = _route(group, nothing)
        if lane is None or lane.size == 1:
            continue
        if interceptor.installed:
            made = interceptor.Collective("open_transports", group, {"tensor": (0, None)}, (nothing,), {})
            interceptor.intercept(made, functools.partial(shared.open_transport, lane))
        else:
            shared.open_transport(lane)


def _route(group: ProcessGroup | None, tensor: Tensor) -> tuple[Lane | None, str]:
    """The lane of `group` if gloo serves `tensor` on the CPU, else None; and the backend's name."""
    if tensor.device.type != "cpu":
        served = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
        return None, served.get(tensor.device.type, "")
    live = _live(group)
    found = _lanes.get(live)
    if found is None:
        served = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
        backend = served.get("cpu", "")
        found = _lanes[live] = (Lane(live) if backend == "gloo" else None, backend)
    return found


def _flat(tensor: Tensor, fill: bool = True) -> tuple[Tensor, Callable[[], Any] | None]:
    """`tensor` as a flat contiguous one, and, if that is a copy, what brings the copy back."""
    plain = tensor.detach()
    if plain.is_contiguous():
        return plain.view(-1), None
    copy = plain.contiguous() if fill else torch.empty(plain.shape, dtype=plain.dtype, device=plain.device)
    return copy.view(-1), lambda: plain.copy_(copy)


def _wire_op(op: Any, backend: str) -> Any:
    return ReduceOp.SUM if op == ReduceOp.AVG and backend not in _AVERAGING else op


def _averager(tensor: Tensor, op: Any, backend: str, size: int) -> Callable[[], Any] | None:
    if op != ReduceOp.AVG or backend in _AVERAGING:
        return None
    return lambda: gloo.average(tensor.detach(), size)


def _nothing(async_op: bool) -> Work | None:
    return AfterWork(()) if async_op else None


def _plain(work: Any, async_op: bool) -> Work | None:
    return cast(Work, work) if async_op else None


def _post(group: ProcessGroup | None, tensor: Tensor, peer: int | None, tag: int) -> Any:
    """What carries this message instead of the backend, or None."""
    lane, _ = _route(group, tensor)
    return lane.post if lane is not None and shared.carries(lane, peer, tag) else None


def _place(group: ProcessGroup | None, global_rank: int) -> int:
    """The rank in `group` of a global one."""
    return dist.get_group_rank(_live(group), global_rank)


def _parts(whole: Tensor, flat: Tensor, rows: Sequence[int] | None, lane: Lane) -> tuple[Tensor, ...]:
    """`flat`, the elements of `whole`, by ranks: so many rows each, None: equally many."""
    count = whole.shape[0] if whole.dim() else 0
    if rows is None and count % lane.size:
        raise CommError(f"all_to_all_single: {count} rows do not divide over {lane.size} ranks; name the split sizes")
    split = [count // lane.size] * lane.size if rows is None else list(rows)
    if len(split) != lane.size or sum(split) != count:
        raise CommError(f"all_to_all_single: split sizes {split} for {count} rows and {lane.size} ranks; one per rank")
    width = math.prod(whole.shape[1:])
    return torch.split(flat, [n * width for n in split])


def _live(group: ProcessGroup | None) -> ProcessGroup:
    live = dist.group.WORLD if group is None else group
    assert live is not None
    return live


def _message(work: Any, group: ProcessGroup | None, tensor: Tensor) -> Work:
    """One message's work; over gloo, one that can be polled."""
    lane, _ = _route(group, tensor)
    return cast(Work, work if lane is None else Messages([work]))


def _end(work: Any, finish: Callable[[], Any] | None, async_op: bool) -> Work | None:
    after = AfterWork([work], finish)
    if async_op:
        return after
    after.wait()
    return None


def _after(work: Any, finish: Callable[[], Any] | None, async_op: bool) -> Work | None:
    if not async_op:
        if finish is not None:
            finish()
        return None
    return cast(Work, work) if finish is None else AfterWork([work], finish)


def _check_lengths(name: str, long_name: str, long: Tensor, short_name: str, short: Tensor, size: int) -> None:
    if long.numel() != short.numel() * size:
        raise CommError(
            f"{name} over {size} ranks: {long_name} has {long.numel()} elements, {short_name} {short.numel()}; "
            f"{long_name} must have {size} x {short.numel()} = {size * short.numel()}"
        )
    if long.dtype != short.dtype:
        raise CommError(f"{name}: {long_name} is {long.dtype}, {short_name} {short.dtype}; they must be equal")
