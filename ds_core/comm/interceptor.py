"""Interceptors: objects called around every collective of this process, to time, count or check it
(torch-free).

`ds_core.comm` calls them for each collective on a group of at least two ranks; those of the lowest
order are outermost: they see the call first and its result last. An interceptor belongs to the
process: it stays until `remove_interceptor`, also when the engine that brought it is destroyed.
With none installed a collective costs one ``if`` more, and what it is for (`label`) is not kept.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from enum import IntEnum
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

OPERATIONS: Mapping[str, str] = {
    "all_gather_into_tensor": "output",
    "reduce_scatter_tensor": "input",
    "all_to_all_single": "input",
    **dict.fromkeys(
        ("all_reduce", "reduce", "broadcast", "send", "recv", "isend", "irecv"), "tensor"
    ),
    "barrier": "",
}
"""Every collective and point-to-point function of `ds_core.comm`: the argument that holds its
message.
"""

TAG_BITS = 27
"""Of a collective's tag; transports use the rest of a message's tag themselves."""


class Order(IntEnum):
    """Where an interceptor stands among others.

    OBSERVE: times and counts.
    CHECK: compares ranks, and may set a tag.
    """

    OBSERVE = 10
    CHECK = 20


class Collective:
    """A collective that this thread is starting.

    op: the function of `ds_core.comm`, one of `OPERATIONS` or "open_transport".
    group: never None.
    arguments: what the function was called with, by name.
    label: what the caller said of it, or "".
    tag: None, or a number below ``2 ** TAG_BITS`` that an interceptor sets: equal on all ranks for
        the same collective, different for others. Transports send it along where they can, so that
        data of two collectives is never mixed up.
    """

    __slots__ = ("arguments", "group", "label", "op", "tag")

    def __init__(self, op: str, group: ProcessGroup, arguments: Mapping[str, Any]) -> None:
        self.op = op
        self.group = group
        self.arguments = arguments
        self.label = _local.label
        self.tag: int | None = None

    @property
    def message(self) -> Tensor | None:
        """The message, of all ranks together where one argument has that (``output`` of a gather);
        None: none.
        """
        return self.arguments.get(OPERATIONS.get(self.op, ""))


class Interceptor(ABC):
    """Called around every collective.

    An exception that it raises ends the collective on this rank.
    """

    order: Order = Order.OBSERVE

    @abstractmethod
    def around(self, collective: Collective, call: Callable[[], Any]) -> Any:
        """Make the collective by ``call()``, exactly once, and return what that returns, or another
        object like it.

        That is a work (``wait()``, ``is_completed()``) with ``async_op=True`` and of `isend` and
        `irecv`, else None. A collective made in here goes through all interceptors again.
        """

    def close(self) -> None:  # noqa: B027 (most have nothing to close)
        """It was removed: nothing is called afterwards."""


class _Local(threading.local):
    """label: of this thread's next collective. current: the one that it is starting."""

    label = ""
    current: Collective | None = None


_local = _Local()
installed: tuple[Interceptor, ...] = ()
"""By order; the collectives look at it once per call. Everybody else uses `interceptors`."""


def interceptors() -> tuple[Interceptor, ...]:
    """Those that are installed, outermost first."""
    return installed


def add_interceptor(interceptor: Interceptor) -> None:
    """Install `interceptor`, unless it is. Every rank calls it between the same collectives."""
    global installed
    if interceptor not in installed:
        installed = tuple(sorted((*installed, interceptor), key=lambda i: i.order))


def remove_interceptor(interceptor: Interceptor) -> None:
    """Take `interceptor` out and close it, if it is installed.

    Every rank calls it between the same collectives.
    """
    global installed
    if interceptor in installed:
        installed = tuple(i for i in installed if i is not interceptor)
        interceptor.close()


def reset() -> None:
    """Remove all interceptors."""
    for interceptor in installed:
        remove_interceptor(interceptor)


def label(text: str) -> None:
    """Say what this thread's next collective is for.

    Ranks must say the same, as they must call the same.
    """
    if installed:
        _local.label = text


def tag() -> int | None:
    """The tag of the collective that this thread starts, for transports; None: no tag is needed."""
    return _local.current.tag if _local.current is not None else None


def intercept(collective: Collective, call: Callable[[], Any]) -> Any:
    """Make a collective, which is ``call()``, through all interceptors; for
    `ds_core.comm.collectives`.
    """
    outer, _local.current, _local.label = _local.current, collective, ""
    for interceptor in reversed(installed):
        call = partial(interceptor.around, collective, call)
    try:
        return call()
    finally:
        _local.current = outer
