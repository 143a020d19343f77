"""What the loader and the engine's methods share: functions of the user's, and where a curriculum
is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ds_core.context import StashKey
from ds_core.errors import UsageError

if TYPE_CHECKING:
    from ds_core.context import Context
    from ds_core.engine import RunningEngine
    from ds_data_sampling.curricula.config import Schedule

log = logging.getLogger("ds_data_sampling")

PostProcess = Callable[[Any, Mapping[str, Any]], Any]


@dataclass
class Callbacks:
    """The functions of one run.

    schedules: by metric, (step from 1) -> difficulty.
    post_process: (batch, state) -> batch, where state has ``curriculum_step`` (the step of the
        batch, from 1) and ``current_difficulties`` (by metric).
    difficulties: those of the last batch.
    loads: whether a loader was made, or its absence was reported.
    """

    schedules: dict[str, Callable[[int], int]] = field(default_factory=dict)
    post_process: PostProcess | None = None
    difficulties: Mapping[str, int] = field(default_factory=dict)
    loads: bool = False


CALLBACKS: StashKey[Callbacks] = StashKey("functions for the loader of dscore-data-sampling")


def callbacks_of(ctx: Context) -> Callbacks:
    """Those of the run of `ctx`; what is set later shows up in it."""
    found = ctx.stash.get(CALLBACKS)
    if found is None:
        found = ctx.stash[CALLBACKS] = Callbacks()
    return found


def warn_unused(ctx: Context) -> None:
    """Say once, on rank 0, that data_sampling has no effect, where training has begun without a
    loader of it.
    """
    callbacks = callbacks_of(ctx)
    if not callbacks.loads and ctx.rank == 0:
        log.warning(
            "data_efficiency.data_sampling has no effect: the batches come from a loader of the "
            "program's own; give "
            "initialize training_data, or make a loader by ds_core.engine.make_loader(engine.ctx, "
            "dataset)"
        )
    callbacks.loads = True


def set_data_post_process_func(
    engine: RunningEngine, post_process_func: PostProcess | None
) -> None:
    """Let `post_process_func` change each batch before it is given out: (batch, state) -> batch;
    None: nothing does.

    state: as in `Callbacks`. It runs in this process, not in the workers that load samples. Batches
    that workers have loaded already go through it as well.
    """
    callbacks_of(engine.ctx).post_process = post_process_func


def set_custom_curriculum_learning_schedule(
    engine: RunningEngine, schedule_func_dict: Mapping[str, Callable[[int], int]]
) -> None:
    """The schedules of metrics whose schedule_type is custom: functions (step from 1) ->
    difficulty, by metric.

    Call it before the first batch, in a run that goes on from a checkpoint as well. Raises
    UsageError for a metric that there is not, or that has a schedule of another type.
    """
    schedules = _schedules(engine.ctx)
    for name in schedule_func_dict:
        if name not in schedules:
            raise UsageError(
                f"no metric of the curriculum is called {name!r}; there are: "
                f"{', '.join(schedules) or 'none'}"
            )
        if (kind := schedules[name].schedule_type) != "custom":
            raise UsageError(
                f"the schedule of {name!r} is {kind}; a function needs schedule_type custom"
            )
    callbacks_of(engine.ctx).schedules.update(schedule_func_dict)


def _schedules(ctx: Context) -> dict[str, Schedule]:
    """By metric; that of the section curriculum_learning is seqlen, unless the other section has
    one of that name.
    """
    from ds_data_sampling.config import DataEfficiency
    from ds_data_sampling.curricula.config import LegacyCurriculum

    found: dict[str, Schedule] = {}
    lengths = ctx.config.section(LegacyCurriculum)
    section = ctx.config.section(DataEfficiency)
    if lengths is not None and lengths.enabled:
        found["seqlen"] = lengths
    if section is not None and section.curriculum is not None:
        found |= section.curriculum.curriculum_metrics
    return found
