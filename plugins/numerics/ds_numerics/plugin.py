"""What dscore-numerics offers: the section ``numerics`` (torch-free)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import pluggy

from ds_core.config import Trait
from ds_core.context import StashKey
from ds_core.errors import Problem

if TYPE_CHECKING:
    from pydantic import BaseModel

    from ds_core.config import RunConfig
    from ds_core.context import Context
    from ds_core.gradients import Gradients
    from ds_core.plugins import Plugins
    from ds_numerics.checking import Checker

ERRORS = "feeds_back_errors"
"""The trait of a section with which a reduction depends on those before."""
CHECKER: StashKey[Checker] = StashKey("the checker of replayed steps")


def ds_config() -> type[BaseModel]:
    """The section ``numerics``."""
    from ds_numerics.config import Numerics

    return Numerics


def ds_check(config: RunConfig, plugins: Plugins) -> Iterable[Problem]:
    """What cannot be computed again by calling the model and autograd."""
    if config.has(Trait.DIVIDES_DEPTH):
        why = "does not go with pipelines: their schedule runs a batch, and it cannot be run again"
        yield Problem("numerics", why, "leave it out, or train without a PipelineModule")
    if config.has(ERRORS):
        why = (
            "does not go with zero_optimization.zeropp_loco_param: each reduction adds the errors "
            "of the one before, so none can be made again"
        )
        yield Problem("numerics", why, "leave one of the two out")
    section = config.core.optimizer
    if section is None:
        return
    answer = plugins.named("ds_optimizers", "optimizer").get(section.type.lower())
    if answer is not None and answer.value.partitioner is not None:
        why = (
            f"does not go with optimizer.type {section.type!r}, which reduces gradients by itself "
            "and keeps the errors of what it sends"
        )
        yield Problem("numerics", why, "leave it out, or use another optimizer")


def ds_open(ctx: Context) -> None:
    """The first step is due."""
    from ds_numerics.checking import Checker

    # A second engine without an optimizer (a frozen teacher) has no step.
    if ctx.engine.optimizer is not None:
        ctx.stash[CHECKER] = Checker(ctx)


def ds_listens(ctx: Context) -> Mapping[str, int]:
    """The end of each Nth step, after which the next one is due."""
    from ds_numerics.config import Numerics

    section = ctx.config.section(Numerics)
    return {"ds_step_end": section.every if section is not None else 0}


# Before others change gradients, which would not be what a replay gives.
@pluggy.HookimplMarker("ds_core")(tryfirst=True)
def ds_gradients(ctx: Context, gradients: Gradients) -> None:
    """A step that is due is computed again, and compared. Collective."""
    if (checker := ctx.stash.get(CHECKER)) is not None:
        checker.check(gradients)


def ds_step_end(ctx: Context, step: int, metrics: Mapping[str, float]) -> None:
    """The next step is due."""
    if (checker := ctx.stash.get(CHECKER)) is not None:
        checker.begin()


def ds_checkpoint_loaded(ctx: Context) -> None:
    """What was recorded belongs to other weights."""
    if (checker := ctx.stash.get(CHECKER)) is not None:
        checker.begin_anew()
