"""A plugin with ways to be wrong in some layouts (torch-free)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

from ds_core.config import Section, option
from ds_core.errors import Problem

if TYPE_CHECKING:
    from ds_core.config import RunConfig
    from ds_core.context import Context
    from ds_core.gradients import Gradients


class Scaling(Section):
    """The section ``scaling``."""

    by: Literal["two", "rank", "slice"] = option("two", "What gradients are multiplied by.")
    refuses: Literal["", "named", "unnamed"] = option("", "How ZeRO is refused.")


def ds_config() -> type[Scaling]:
    """The section's model."""
    return Scaling


def ds_check(config: RunConfig) -> Iterable[Problem]:
    """Refuse ZeRO, where the section asks for it."""
    section = config.section(Scaling)
    if section is None or not section.refuses or "zero_optimization" not in config.raw:
        return
    if section.refuses == "named":
        yield Problem("scaling.by", "does not go with zero_optimization", "leave one out")
    else:
        yield Problem("steps_per_print", "something is wrong", "try something else")


def ds_gradients(ctx: Context, gradients: Gradients) -> None:
    """Multiply."""
    section = ctx.config.section(Scaling)
    assert section is not None
    for shard in gradients.shards:
        size = shard.shape[0] if section.by == "slice" else 2.0
        shard.tensor.mul_(1.0 + ctx.rank if section.by == "rank" else size)
