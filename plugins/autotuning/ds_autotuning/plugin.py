"""What ds-autotuning offers to ds_core: the section ``autotuning`` (torch-free)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ds_core.context import StashKey

if TYPE_CHECKING:
    from pydantic import BaseModel

    from ds_autotuning.measuring import Measuring
    from ds_core.context import Context
    from ds_core.entries import Request

__all__ = [
    "ds_config",
    "ds_engine_methods",
    "ds_exception",
    "ds_request",
    "ds_step_begin",
    "ds_step_end",
]

MEASURING: StashKey[Measuring] = StashKey("the measurement that a tuner asked for")


def ds_config() -> type[BaseModel]:
    """The section ``autotuning``."""
    from ds_autotuning.config import Autotuning

    return Autotuning


def ds_engine_methods(ctx: Context) -> Mapping[str, Callable[..., Any]]:
    """None; but it is asked for on every rank when the engine is built, so measuring begins here."""
    from ds_autotuning.config import Autotuning

    section = ctx.config.section("autotuning")
    if isinstance(section, Autotuning) and section.measures:
        from ds_autotuning.measuring import Measuring

        ctx.stash[MEASURING] = Measuring(ctx, section)
    return {}


def ds_step_begin(ctx: Context, step: int) -> None:
    """Of a trial."""
    if (measuring := ctx.stash.get(MEASURING)) is not None:
        measuring.step_begin(step)


def ds_step_end(ctx: Context, step: int, metrics: Mapping[str, float]) -> None:
    """Of a trial."""
    if (measuring := ctx.stash.get(MEASURING)) is not None:
        measuring.step_end(step, metrics)


def ds_request(ctx: Context, step: int, metrics: Mapping[str, float]) -> Request | None:
    """End the trial when enough is measured."""
    measuring = ctx.stash.get(MEASURING)
    return None if measuring is None else measuring.request(step)


def ds_exception(ctx: Context, error: BaseException) -> None:
    """A trial that failed is a result."""
    if (measuring := ctx.stash.get(MEASURING)) is not None:
        measuring.failed(error)
