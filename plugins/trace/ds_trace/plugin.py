"""What dscore-trace offers: the section ``torch_profiler``, what it listens to, and ``dscore trace``
(torch-free).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ds_core.context import StashKey
from ds_core.entries import CommandEntry

if TYPE_CHECKING:
    from pydantic import BaseModel

    from ds_core.comm.interceptor import Interceptor
    from ds_core.config import RunConfig
    from ds_core.context import Context
    from ds_trace.tracer import Tracer

TRACER: StashKey[Tracer | None] = StashKey("the tracer")


def ds_config() -> type[BaseModel]:
    """The section ``torch_profiler``."""
    from ds_trace.config import TorchProfiler

    return TorchProfiler


def ds_commands() -> Mapping[str, CommandEntry]:
    """``dscore trace``."""
    return {
        "trace": CommandEntry(
            "ds_trace.command:trace", "Where the traced steps of a run went, on each rank."
        )
    }


def ds_interceptors(config: RunConfig) -> Iterable[Interceptor]:
    """What names collectives in the trace, until the last traced step is over."""
    from ds_core.comm.interceptor import interceptors
    from ds_trace.collectives import NamedCollectives
    from ds_trace.config import TorchProfiler

    section = config.section(TorchProfiler)
    if section is None or not section.enabled:
        return ()
    return [i for i in interceptors() if isinstance(i, NamedCollectives)] or (NamedCollectives(),)


def ds_open(ctx: Context) -> None:
    """The tracer of this run; rank 0 says what will be traced."""
    from ds_trace.tracer import make_tracer

    ctx.stash[TRACER] = tracer = make_tracer(ctx)
    if tracer is not None and ctx.rank == 0:
        tracer.announce()


def ds_phase_begin(ctx: Context, phase: str) -> None:
    """The first phase of a step starts the profiler when it is due; a phase that is recorded gets
    its name.
    """
    if (tracer := ctx.stash.get(TRACER)) is not None:
        tracer.phase_begin(phase)


def ds_phase_end(ctx: Context, phase: str) -> None:
    """The innermost phase has ended."""
    if (tracer := ctx.stash.get(TRACER)) is not None:
        tracer.phase_end()


def ds_step_end(ctx: Context) -> None:
    """The profiler's next step; after the last one the file is written."""
    if (tracer := ctx.stash.get(TRACER)) is not None and tracer.step_end():
        _stop(ctx)


def ds_close(ctx: Context) -> None:
    """What was recorded so far is kept."""
    _stop(ctx)


def _stop(ctx: Context) -> None:
    tracer: Any = ctx.stash.get(TRACER)
    if tracer is not None:
        tracer.stop()
        ctx.stash[TRACER] = None
