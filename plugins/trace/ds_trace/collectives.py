"""`NamedCollectives`: gives collectives their names in a trace, and the waiting for those in the
background.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ds_core.comm.interceptor import OPERATIONS, Collective, Interceptor, Order
from ds_trace.names import COMM, MESSAGES, WAIT, Named, shown_ranks

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class NamedCollectives(Interceptor):
    """Counts the collectives of each group, so that ranks agree on a number for each; names them
    while `recording`.
    """

    order = Order.OBSERVE

    def __init__(self) -> None:
        self.recording = False
        self._made: Counter[tuple[str, ...]] = Counter()

    def around(self, collective: Collective, call: Callable[[], Any]) -> Any:
        """``call()``, in a range; a work that it returns is waited for in another."""
        key, peer = self._key(collective)
        if not self.recording:
            return call()
        from torch.profiler import record_function

        message = collective.message
        name = Named(
            MESSAGES.get(collective.op, collective.op),
            collective.label,
            0 if message is None else message.nbytes,
            _ranks(collective.group),
            key,
            peer,
        )
        with record_function(f"{COMM}{name}"):
            result = call()
        return result if result is None else _NamedWork(result, f"{WAIT}{name}")

    def _key(self, collective: Collective) -> tuple[str, int | None]:
        """(the number of this collective or message, the other rank of a message); the same on both
        sides.
        """
        group = collective.group.group_name
        op = MESSAGES.get(collective.op)
        at: tuple[str, ...] = (group,)
        peer = None
        if op is not None:
            from torch.distributed import get_rank

            me = get_rank()
            peer = int(collective.arguments["dst" if op == "send" else "src"])
            at = (group, *map(str, (me, peer) if op == "send" else (peer, me)))
        if collective.op in OPERATIONS:
            self._made[at] += 1
        return f"{'-'.join(at)}#{self._made[at]}", peer


def _ranks(group: ProcessGroup) -> str:
    from torch.distributed import get_process_group_ranks

    return shown_ranks(get_process_group_ranks(group))


class _NamedWork:
    """A work whose `wait` is a range in the trace."""

    def __init__(self, work: Any, name: str) -> None:
        self._work = work
        self._name = name

    def wait(self, timeout: timedelta | None = None) -> Any:
        from torch.profiler import record_function

        with record_function(self._name):
            return self._work.wait() if timeout is None else self._work.wait(timeout)

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())
