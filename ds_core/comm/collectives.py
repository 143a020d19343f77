"""The collectives everything else calls: torch.distributed's signatures, served by whatever is best for each group.

At one rank (or with no process group) nothing is called at all. Else a group's provider serves, where one is in use
(`use_providers`), and `ds_core.comm.plain` what that leaves.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from ds_core.comm import ALONE, interceptor
from ds_core.comm.contract import AfterWork, GroupCollectives, Work
from ds_core.errors import CommError

__all__ = [
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
    "use_providers",
    "world_size",
]

P = ParamSpec("P")
R = TypeVar("R")
Maker = Callable[[ProcessGroup, bool], GroupCollectives]


class _Group:
    """What is kept per live process group, by device type; it goes with the group.

    backends: which backend serves. made: by maker, also those in use no longer. ways: who is asked, in this order.
    carriers: who carries messages, since a receive must look where its message is: the first provider, or None: torch,
    if there were messages before it.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.backends = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
        self.made: dict[Maker, GroupCollectives] = {}
        self.ways: dict[str, tuple[GroupCollectives, ...]] = {}
        self.carriers: dict[str, GroupCollectives | None] = {}


_groups: WeakKeyDictionary[ProcessGroup, _Group] = WeakKeyDictionary()
_makers: Mapping[tuple[str, str], Maker] = {}


def use_providers(makers: Mapping[tuple[str, str], Maker]) -> None:
    """Let ``maker(group, messages)`` give what serves groups of each ``(device type, backend)`` from here on.

    messages: whether others carried messages of the group before. Every rank calls this between the same collectives.
    """
    global _makers
    if makers != _makers:
        _makers = dict(makers)
        for known in _groups.values():
            known.ways.clear()


def reset() -> None:
    """Use no provider; those of messages stay with their groups."""
    use_providers({})


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
    if members(group) == 1:
        return _nothing(async_op)
    flat, back = _flat(tensor)
    return _after(_serve("all_reduce", group, flat, flat, op, async_op), back, async_op)


@_intercepted
def reduce(
    tensor: Tensor, dst: int, op: Any = ReduceOp.SUM, group: ProcessGroup | None = None, async_op: bool = False
) -> Work | None:
    """Reduce into `tensor` of global rank `dst`; elsewhere its content is undefined afterwards."""
    if members(group) == 1:
        return _nothing(async_op)
    flat, back = _flat(tensor)
    return _after(_serve("reduce", group, flat, flat, _place(group, dst), op, async_op), back, async_op)


@_intercepted
def broadcast(tensor: Tensor, src: int, group: ProcessGroup | None = None, async_op: bool = False) -> Work | None:
    """Replace `tensor`, on every rank, by that of global rank `src`."""
    if members(group) == 1 or tensor.numel() == 0:
        return _nothing(async_op)
    flat, back = _flat(tensor)
    return _after(_serve("broadcast", group, flat, flat, _place(group, src), async_op), back, async_op)


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
    flat, back = _flat(output, fill=False)
    return _after(_serve("all_gather_into", group, flat, flat, _flat(input)[0], async_op), back, async_op)


@_intercepted
def all_gather(
    tensor_list: Sequence[Tensor], tensor: Tensor, group: ProcessGroup | None = None, async_op: bool = False
) -> Work | None:
    """Fill `tensor_list[i]` with rank i's `tensor`. Over gloo the lengths may differ between ranks, or be 0."""
    size, here = members(group), rank(group)
    if len(tensor_list) != size:
        raise CommError(f"all_gather over {size} ranks was given {len(tensor_list)} tensors to fill; give {size}")
    if tensor_list[here].numel() != tensor.numel():
        raise CommError(
            f"all_gather: tensor_list[{here}] has {tensor_list[here].numel()} elements, "
            f"this rank's tensor {tensor.numel()}; they must be equal"
        )
    if size == 1:
        tensor_list[0].detach().copy_(tensor.detach())
        return _nothing(async_op)
    pairs = [_flat(t, fill=False) for t in tensor_list]
    backs = [back for _, back in pairs if back is not None]
    work = _serve("all_gather", group, tensor, [flat for flat, _ in pairs], _flat(tensor)[0], async_op)
    return _after(work, (lambda: [back() for back in backs]) if backs else None, async_op)


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
    flat, back = _flat(output, fill=False)
    return _after(_serve("reduce_scatter", group, flat, flat, _flat(input)[0], op, async_op), back, async_op)


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
    if (size := members(group)) == 1:
        output.detach().copy_(input.detach())
        return _nothing(async_op)
    if output.dtype != input.dtype:
        raise CommError(f"all_to_all_single: output is {output.dtype}, input {input.dtype}; they must be equal")
    taken, given = _lengths(output, output_split_sizes, size), _lengths(input, input_split_sizes, size)
    flat, back = _flat(output, fill=False)
    return _after(_serve("all_to_all", group, flat, flat, _flat(input)[0], taken, given, async_op), back, async_op)


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
    work = _carry("isend", group, tensor, _flat(tensor)[0], dst, tag)
    if work is NotImplemented:
        dist.send(tensor, dst, group, tag)
    else:
        work.wait()


@_intercepted
def recv(tensor: Tensor, src: int | None = None, group: ProcessGroup | None = None, tag: int = 0) -> int:
    """Receive into `tensor` from global rank `src` (None: whoever sends); returns the sender."""
    flat, back = _flat(tensor, fill=False)
    work = _carry("irecv", group, tensor, flat, src, tag)
    if work is NotImplemented:
        return dist.recv(tensor, src, group, tag)
    AfterWork([work], back).wait()
    return dist.get_global_rank(_live(group), work.source) if src is None else src


@_intercepted
def isend(tensor: Tensor, dst: int, group: ProcessGroup | None = None, tag: int = 0) -> Work:
    """Start sending `tensor` to global rank `dst`; it must stay as it is until the work is done."""
    work = _carry("isend", group, tensor, _flat(tensor)[0], dst, tag)
    return AfterWork([dist.isend(tensor, dst, group, tag)]) if work is NotImplemented else cast(Work, work)


@_intercepted
def irecv(tensor: Tensor, src: int | None = None, group: ProcessGroup | None = None, tag: int = 0) -> Work:
    """Start receiving into `tensor` from global rank `src` (None: whoever sends)."""
    flat, back = _flat(tensor, fill=False)
    work = _carry("irecv", group, tensor, flat, src, tag)
    if work is NotImplemented:
        return AfterWork([dist.irecv(tensor, src, group, tag)])
    return cast(Work, _after(work, back, True))


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
    if interceptor.installed or _carrier(group, operations[0][1]) is not None:
        return [function(tensor, peer, group) for function, tensor, peer in operations]
    batch = [dist.P2POp(kinds[function], tensor, peer, group) for function, tensor, peer in operations]
    return [AfterWork([work]) for work in dist.batch_isend_irecv(batch)]


@_intercepted
def barrier(group: ProcessGroup | None = None, async_op: bool = False) -> Work | None:
    """Return when every rank of `group` has called it."""
    if members(group) == 1:
        return _nothing(async_op)
    return _plain(dist.barrier(group, async_op), async_op)


def open_transports(groups: Iterable[ProcessGroup]) -> None:
    """Let the providers of `groups` set up what all ranks take part in. Collective over each: ranks give one order."""
    for group in groups:
        if group is ALONE or group.size() == 1:
            continue
        known = _known(group)
        for device, backend in sorted(known.backends.items()):
            if (device, backend) not in _makers:
                continue
            (own, *_) = _ways(known, group, device)
            if interceptor.installed:
                parameters = {"tensor": (0, None)}
                made = interceptor.Collective("open_transports", group, parameters, (torch.empty(0),), {})
                interceptor.intercept(made, own.open)
            else:
                own.open()


# -- who serves a call -------------------------------------------------------------------------------------------------


def _serve(method: str, group: ProcessGroup | None, like: Tensor, *arguments: Any) -> Any:
    """Call `method` of whatever serves it first in the group, for tensors on the device of `like`."""
    live, device = _live(group), like.device.type
    known = _groups.get(live) or _known(live)
    for way in known.ways.get(device) or _ways(known, live, device):
        if (work := getattr(way, method)(*arguments)) is not NotImplemented:
            return work
    raise CommError(f"nothing serves {method} of {like.dtype} on {device}")


def _known(group: ProcessGroup) -> _Group:
    found = _groups.get(group)
    if found is None:
        found = _groups[group] = _Group(group)
    return found


def _ways(known: _Group, group: ProcessGroup, device: str) -> tuple[GroupCollectives, ...]:
    """The group's provider, if one is in use for `device`, and torch.distributed."""
    from ds_core.comm.plain import PlainCollectives

    backend = known.backends.get(device, "")
    ways: tuple[GroupCollectives, ...] = (PlainCollectives(group, backend),)
    if (maker := _makers.get((device, backend))) is not None:
        if maker not in known.made:
            made = known.made[maker] = maker(group, device in known.carriers)
            known.carriers.setdefault(device, made)
        ways = (known.made[maker], *ways)
    known.ways[device] = ways
    return ways


def _carrier(group: ProcessGroup | None, tensor: Tensor) -> GroupCollectives | None:
    """Who carries the group's messages of such tensors; None: torch."""
    live, device = _live(group), tensor.device.type
    known = _known(live)
    if device not in known.carriers:
        _ways(known, live, device)
    return known.carriers.setdefault(device, None)


def _carry(method: str, group: ProcessGroup | None, tensor: Tensor, flat: Tensor, peer: int | None, tag: int) -> Any:
    """`isend` or `irecv` of the group's carrier; peer: global rank."""
    members(group)
    if peer is not None and peer == dist.get_rank():
        raise CommError(f"{method}: rank {peer} is this rank; a message to oneself is a copy")
    if (carrier := _carrier(group, tensor)) is None:
        return NotImplemented
    return getattr(carrier, method)(flat, None if peer is None else _place(group, peer), tag)


# -- tensors and works -------------------------------------------------------------------------------------------------


def _flat(tensor: Tensor, fill: bool = True) -> tuple[Tensor, Callable[[], Any] | None]:
    """`tensor` as a flat contiguous one, and, if that is a copy, what brings the copy back."""
    plain = tensor.detach()
    if plain.is_contiguous():
        return plain.view(-1), None
    copy = plain.contiguous() if fill else torch.empty(plain.shape, dtype=plain.dtype, device=plain.device)
    return copy.view(-1), lambda: plain.copy_(copy)


def _nothing(async_op: bool) -> Work | None:
    return AfterWork(()) if async_op else None


def _plain(work: Any, async_op: bool) -> Work | None:
    return cast(Work, work) if async_op else None


def _after(work: Any, finish: Callable[[], Any] | None, async_op: bool) -> Work | None:
    if not async_op:
        if finish is not None:
            finish()
        return None
    return cast(Work, work) if finish is None else AfterWork([work], finish)


def _place(group: ProcessGroup | None, global_rank: int) -> int:
    """The rank in `group` of a global one."""
    return dist.get_group_rank(_live(group), global_rank)


def _live(group: ProcessGroup | None) -> ProcessGroup:
    live = dist.group.WORLD if group is None else group
    assert live is not None
    return live


def _lengths(whole: Tensor, rows: Sequence[int] | None, size: int) -> list[int] | None:
    """The elements of each rank's part of `whole`, of so many rows each; None where they are to be equal."""
    count = whole.shape[0] if whole.dim() else 0
    if rows is None and count % size:
        raise CommError(f"all_to_all_single: {count} rows do not divide over {size} ranks; name the split sizes")
    if rows is None:
        return None
    if len(rows) != size or sum(rows) != count:
        raise CommError(f"all_to_all_single: split sizes {list(rows)} for {count} rows and {size} ranks; one per rank")
    width = math.prod(whole.shape[1:])
    return [n * width for n in rows]


def _check_lengths(name: str, long_name: str, long: Tensor, short_name: str, short: Tensor, size: int) -> None:
    if long.numel() != short.numel() * size:
        raise CommError(
            f"{name} over {size} ranks: {long_name} has {long.numel()} elements, {short_name} {short.numel()}; "
            f"{long_name} must have {size} x {short.numel()} = {size * short.numel()}"
        )
    if long.dtype != short.dtype:
        raise CommError(f"{name}: {long_name} is {long.dtype}, {short_name} {short.dtype}; they must be equal")
