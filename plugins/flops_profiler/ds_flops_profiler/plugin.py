"""What dscore-flops-profiler offers to ds_core: the section ``flops_profiler``, and its observers
(torch-free).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ds_core.context import StashKey

if TYPE_CHECKING:
    from pydantic import BaseModel

    from ds_core.context import Context
    from ds_flops_profiler.training import StepProfile, StepRate

PROFILE: StashKey[StepProfile | None] = StashKey("the profile of one step")
RATE: StashKey[StepRate] = StashKey("FLOPs per second, from what the profile has counted")


def ds_config() -> type[BaseModel]:
    """The section ``flops_profiler``."""
    from ds_flops_profiler.config import FlopsProfilerConfig

    return FlopsProfilerConfig


def _profile(ctx: Context) -> StepProfile | None:
    """The profile while its step is under way or still to come; made at the first forward."""
    if PROFILE not in ctx.stash:
        from ds_flops_profiler.training import profile_of

        ctx.stash[PROFILE] = profile_of(ctx)
    return ctx.stash[PROFILE]


def ds_phase_begin(ctx: Context, phase: str) -> None:
    """Measure the phases of the step to profile."""
    if (profile := _profile(ctx)) is not None and ctx.engine.global_steps == profile.step:
        profile.begin(phase)


def ds_phase_end(ctx: Context, phase: str) -> None:
    """The phase is over."""
    if (profile := _profile(ctx)) is not None and ctx.engine.global_steps == profile.step:
        profile.end(phase)


def ds_step_end(ctx: Context, step: int) -> None:
    """Print the profile of the step that ends here."""
    if (profile := _profile(ctx)) is not None and step == profile.step:
        ctx.stash[PROFILE] = None
        ctx.stash[RATE] = profile.finish()


def ds_metrics(ctx: Context) -> Mapping[str, float]:
    """FLOPs per second and rank, and their share of ``peak_tflops``: of each step after the one
    that was profiled.
    """
    rate = ctx.stash.get(RATE)
    return {} if rate is None else rate.read()
