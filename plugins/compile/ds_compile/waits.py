"""Waiting for the device around collectives: slow, and tells which of them an error or a wait
belongs to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ds_core.accelerator import get_accelerator
from ds_core.comm.interceptor import Collective, Interceptor

if TYPE_CHECKING:
    from ds_compile.config import CompileConfig

REDUCTIONS = frozenset({"all_reduce", "reduce", "reduce_scatter_tensor"})
GATHERS = frozenset({"all_gather_into_tensor"})


@dataclass(frozen=True)
class Waits(Interceptor):
    """Waits for the device before and after the collectives named; equal ones are installed
    once."""

    before: frozenset[str]
    after: frozenset[str]

    def around(self, collective: Collective, call: Callable[[], Any]) -> Any:
        """See `Interceptor.around`."""
        if collective.op in self.before:
            get_accelerator().synchronize()
        work = call()
        if collective.op in self.after:
            if work is not None:
                work.wait()
            get_accelerator().synchronize()
        return work


def waits_of(section: CompileConfig) -> Iterable[Interceptor]:
    """What the keys ``sync_*`` ask for; nothing where none is set."""
    before = _ops(section.sync_before_reduce, section.sync_before_allgather)
    after = _ops(section.sync_after_reduce, section.sync_after_allgather)
    return [Waits(before, after)] if before or after else []


def _ops(reduces: bool, gathers: bool) -> frozenset[str]:
    return (REDUCTIONS if reduces else frozenset()) | (GATHERS if gathers else frozenset())
