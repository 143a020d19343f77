"""The collectives everything else calls: torch.distributed's signatures, served by whatever is best
for each group.

At one rank (or with no process group) nothing is called at all. Else the `GroupCollectives` of the
group serve: those of a provider, where one is in use (`use_providers`), or torch.distributed's.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from ds_core.comm import interceptor
from ds_core.comm.groups import ALONE
from ds_core.comm.providers import AfterWork, GroupCollectives, Work
from ds_core.errors import CommError

P = ParamSpec("P")
R = TypeVar("R")
Maker = Callable[[ProcessGroup, bool], GroupCollectives]


class _Group:
    """What is kept per live process group, and freed with it.

    made: by maker, also those in use no longer.
    serving: by device type, those in use.
    carriers: by device type, who carries messages, since a receive must look where its message is:
        the first provider, or torch.distributed if there were messages before it.
    count, messages: what this rank called; messages by sender and receiver.
    """

    def __init__(self, group: ProcessGroup) -> None:
        plain = GroupCollectives(group, False)
        self.backends = plain.backends
        self.made: dict[Maker, GroupCollectives] = {GroupCollectives: plain}
        self.serving: dict[str, GroupCollectives] = {}
        self.carriers: dict[str, GroupCollectives] = {}
        self.count = 0
        self.messages = Counter[tuple[int, int]]()


_groups: WeakKeyDictionary[ProcessGroup, _Group] = WeakKeyDictionary()
_makers: Mapping[tuple[str, str], Maker] = {}


def use_providers(makers: Mapping[tuple[str, str], Maker]) -> None:
    """Serve groups of each ``(device type, backend)`` by ``maker(group, messages)`` from now on.

    messages: whether others carried messages of the group before. Every rank calls this between the
    same collectives.
    """
    global _makers
    # What a group has made stays with it: its messages may be under way.
    if makers != _makers:
        _makers = dict(makers)
        for known in _groups.values():
            known.serving.clear()


def reset() -> None:
    """Use no provider; those of messages stay with their groups."""
    use_providers({})


def world_size(group: ProcessGroup | None = None) -> int:
    """The number of ranks in `group` (None: all); 1 when no process group runs."""
    return dist.get_world_size(group) if group is not ALONE and dist.is_initialized() else 1


def rank(group: ProcessGroup | None = None) -> int:
    """This process's place in `group` (None: all); 0 when no process group runs."""
    return dist.get_rank(group) if group is not ALONE and dist.is_initialized() else 0


def members(group: ProcessGroup | None) -> int:
    """`world_size`, for a call that only members may make."""
    size = world_size(group)
    if size < 1:  # torch's answer for the others
        raise CommError(
            f"rank {rank()} is not in the group it called a collective on; only its members may "
            "call"
        )
    return size


def _intercepted(function: Callable[P, R]) -> Callable[P, R]:
    """Let the installed interceptors see each call of `function` among several ranks; one `if` when
    there are none.
    """
    op = function.__name__
    names = tuple(inspect.signature(function).parameters)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            # A graph ends here: the code of transports cannot be traced.
            return torch.compiler.disable(call)(*args, **kwargs)  # type: ignore[no-any-return]
        if not interceptor.installed:
            return function(*args, **kwargs)
        arguments = {**dict(zip(names, args)), **kwargs}  # noqa: B905 (the rest are defaults)
        group = arguments.get("group") or dist.group.WORLD
        # A group of one sends nothing, so interceptors do not see the call; its label is used up,
        # or the next collective would get it.
        if not isinstance(group, ProcessGroup) or group.size() == 1:
            interceptor.label("")
            return function(*args, **kwargs)
        made = interceptor.Collective(op, group, arguments)
        return cast(R, interceptor.intercept(made, functools.partial(function, *args, **kwargs)))

    return call


@_intercepted
def all_reduce(
    tensor: Tensor,
    op: Any = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Replace `tensor`, on every rank, by the reduction over all ranks; the same bits
    everywhere."""
    if members(group) == 1:
        return _nothing(async_op)
    flat, back = _flat(tensor)
    return _after(_serving(group, flat.device.type).all_reduce(flat, op, async_op), back, async_op)


@_intercepted
def reduce(
    tensor: Tensor,
    dst: int,
    op: Any = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Reduce into `tensor` of global rank `dst`; elsewhere its content is undefined afterwards."""
    if members(group) == 1:
        return _nothing(async_op)
    flat, back = _flat(tensor)
    return _after(
        _serving(group, flat.device.type).reduce(flat, _place(group, dst), op, async_op),
        back,
        async_op,
    )


@_intercepted
def broadcast(
    tensor: Tensor, src: int, group: ProcessGroup | None = None, async_op: bool = False
) -> Work | None:
    """Replace `tensor`, on every rank, by that of global rank `src`."""
    if members(group) == 1 or tensor.numel() == 0:
        return _nothing(async_op)
    flat, back = _flat(tensor)
    return _after(
        _serving(group, flat.device.type).broadcast(flat, _place(group, src), async_op),
        back,
        async_op,
    )


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
    return _after(
        _serving(group, flat.device.type).all_gather_into(flat, _flat(input)[0], async_op),
        back,
        async_op,
    )


@_intercepted
def reduce_scatter_tensor(
    output: Tensor,
    input: Tensor,
    op: Any = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Fill `output` with this rank's n-th part of the reduction of `input`.

    `input` is n times as long, of any shape.
    """
    size = members(group)
    _check_lengths("reduce_scatter_tensor", "input", input, "output", output, size)
    if size == 1:
        output.detach().view(-1).copy_(input.detach().reshape(-1))
        return _nothing(async_op)
    flat, back = _flat(output, fill=False)
    return _after(
        _serving(group, flat.device.type).reduce_scatter(flat, _flat(input)[0], op, async_op),
        back,
        async_op,
    )


@_intercepted
def all_to_all_single(
    output: Tensor,
    input: Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Send the i-th part of `input` (along dim 0) to rank i.

    `output` receives the ranks' parts, in rank order.
    """
    if (size := members(group)) == 1:
        output.detach().copy_(input.detach())
        return _nothing(async_op)
    if output.dtype != input.dtype:
        raise CommError(
            f"all_to_all_single: output is {output.dtype}, input {input.dtype}; they must be equal"
        )
    taken = _lengths(output, output_split_sizes, size)
    given = _lengths(input, input_split_sizes, size)
    flat, back = _flat(output, fill=False)
    serving = _serving(group, flat.device.type)
    return _after(serving.all_to_all(flat, _flat(input)[0], taken, given, async_op), back, async_op)


@_intercepted
def send(tensor: Tensor, dst: int, group: ProcessGroup | None = None) -> None:
    """Send `tensor` to global rank `dst`; returns when it may be changed again.

    To be received by this module's `recv` or `irecv`, not by torch.distributed's: they may look
    elsewhere.
    """
    _carrier(tensor, group, to=dst).isend(_flat(tensor)[0], _place(group, dst)).wait()


@_intercepted
def recv(tensor: Tensor, src: int, group: ProcessGroup | None = None) -> None:
    """Receive into `tensor` from global rank `src`."""
    flat, back = _flat(tensor, fill=False)
    AfterWork([_carrier(tensor, group, source=src).irecv(flat, _place(group, src))], back).wait()


@_intercepted
def isend(tensor: Tensor, dst: int, group: ProcessGroup | None = None) -> Work:
    """Start sending `tensor` to global rank `dst`; it must stay as it is until the work is done."""
    return _carrier(tensor, group, to=dst).isend(_flat(tensor)[0], _place(group, dst))


@_intercepted
def irecv(tensor: Tensor, src: int, group: ProcessGroup | None = None) -> Work:
    """Start receiving into `tensor` from global rank `src`."""
    flat, back = _flat(tensor, fill=False)
    return cast(
        Work,
        _after(_carrier(tensor, group, source=src).irecv(flat, _place(group, src)), back, True),
    )


@_intercepted
def barrier(group: ProcessGroup | None = None, async_op: bool = False) -> Work | None:
    """Return when every rank of `group` has called it."""
    if members(group) == 1:
        return _nothing(async_op)
    _known(_live(group)).count += 1
    return _after(dist.barrier(group, async_op), None, async_op)


@_intercepted
def open_transport(group: ProcessGroup) -> None:
    """Let the provider of `group` set up what all its ranks take part in. Collective."""
    if members(group) > 1:
        for device in sorted(_known(group).backends):
            _serving(group, device).open()


# -- who serves a call -----------------------------------------------------------------------------


def _known(group: ProcessGroup) -> _Group:
    return _groups.get(group) or _groups.setdefault(group, _Group(group))


def called() -> list[tuple[ProcessGroup, int, Mapping[tuple[int, int], int]]]:
    """Each group, with the counts of this rank's collectives and messages on it.

    Messages are counted by sender and receiver.
    """
    return [(group, known.count, known.messages) for group, known in list(_groups.items())]


def _serving(group: ProcessGroup | None, device: str, count: int = 1) -> GroupCollectives:
    """What serves the group's collectives of tensors on `device`.

    count: of collectives that are called now.
    """
    live = _live(group)
    known = _known(live)
    known.count += count
    found = known.serving.get(device)
    if found is None:
        maker = _makers.get((device, known.backends.get(device, "")), GroupCollectives)
        if maker not in known.made:
            known.made[maker] = maker(live, device in known.carriers)
        found = known.serving[device] = known.made[maker]
        if maker is not GroupCollectives:
            known.carriers.setdefault(device, found)
    return found


def _carrier(
    tensor: Tensor, group: ProcessGroup | None, *, to: int = -1, source: int = -1
) -> GroupCollectives:
    """Who carries the group's messages of such tensors.

    to, source: the other end's global rank, one of them.
    """
    members(group)
    if (me := dist.get_rank()) in (to, source):
        raise CommError(f"rank {me} is this rank; a message to oneself is a copy")
    known = _known(_live(group))
    device = tensor.device.type
    known.messages[(me, to) if source < 0 else (source, me)] += 1
    return known.carriers.get(device) or known.carriers.setdefault(
        device, _serving(group, device, count=0)
    )


# -- tensors and works -----------------------------------------------------------------------------


def _flat(tensor: Tensor, fill: bool = True) -> tuple[Tensor, Callable[[], Any] | None]:
    """`tensor` as a flat contiguous one, and, if that is a copy, what brings the copy back."""
    # Backends write through the memory, which autograd must not see.
    plain = tensor.detach()
    if plain.is_contiguous():
        return plain.view(-1), None
    copy = (
        plain.contiguous()
        if fill
        else torch.empty(plain.shape, dtype=plain.dtype, device=plain.device)
    )
    return copy.view(-1), lambda: plain.copy_(copy)


def _nothing(async_op: bool) -> Work | None:
    return AfterWork(()) if async_op else None


def _after(work: Any, finish: Callable[[], Any] | None, async_op: bool) -> Work | None:
    if async_op:
        return (
            AfterWork([work], finish)
            if finish is not None or isinstance(work, dist.Work)
            else cast(Work, work)
        )
    if finish is not None:
        finish()
    return None


def _place(group: ProcessGroup | None, global_rank: int) -> int:
    """The rank in `group` of a global one."""
    return dist.get_group_rank(_live(group), global_rank)


def _live(group: ProcessGroup | None) -> ProcessGroup:
    return cast(ProcessGroup, dist.group.WORLD if group is None else group)


def _lengths(whole: Tensor, rows: Sequence[int] | None, size: int) -> list[int] | None:
    """The elements of each rank's part of `whole`, by their rows; None where they are to be equal."""
    count = whole.shape[0] if whole.dim() else 0
    if rows is None and count % size:
        raise CommError(
            f"all_to_all_single: {count} rows do not divide over {size} ranks; name the split sizes"
        )
    if rows is None:
        return None
    if len(rows) != size or sum(rows) != count:
        raise CommError(
            f"all_to_all_single: split sizes {list(rows)} for {count} rows and {size} ranks; one "
            "per rank"
        )
    width = math.prod(whole.shape[1:])
    return [n * width for n in rows]


def _check_lengths(
    name: str, long_name: str, long: Tensor, short_name: str, short: Tensor, size: int
) -> None:
    if long.numel() != short.numel() * size:
        raise CommError(
            f"{name} over {size} ranks: {long_name} has {long.numel()} elements, {short_name} "
            f"{short.numel()}; {long_name} must have {size} x {short.numel()} = {size * short.numel()}"
        )
    if long.dtype != short.dtype:
        raise CommError(
            f"{name}: {long_name} is {long.dtype}, {short_name} {short.dtype}; they must be equal"
        )
