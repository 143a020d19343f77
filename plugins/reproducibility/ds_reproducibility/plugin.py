"""What this distribution offers to ds_core: the section ``reproducibility`` and its transforms
(torch-free).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ds_core.entries import Phase, Transform
from ds_core.errors import Problem

if TYPE_CHECKING:
    from pydantic import BaseModel

    from ds_core.config import RunConfig
    from ds_core.context import Context
    from ds_reproducibility.config import Reproducibility


def ds_config() -> type[BaseModel]:
    """The section ``reproducibility``."""
    from ds_reproducibility.config import Reproducibility

    return Reproducibility


def ds_check(config: RunConfig) -> Iterable[Problem]:
    """Compiled graphs end at each draw."""
    section = _section(config)
    if section is not None and section.dropout and config.has("compiles"):
        why = "does not go with compile: a graph would end at each dropout, and be compiled again"
        yield Problem(
            "reproducibility.dropout",
            why,
            "switch one of the two off, compile.at_start and compile.deepcompile or this",
        )


def ds_transforms(ctx: Context) -> Iterable[Transform]:
    """Parameters are drawn while they are whole; modules are named before ranks divide them, and
    inside of what is computed again in backward. Layers are divided by then.
    """
    section = _section(ctx.config)
    if section is None:
        return

    def draw(model):  # type: ignore[no-untyped-def]
        from ds_reproducibility.initialization import draw_again

        return draw_again(model, section.seed)

    def install(model):  # type: ignore[no-untyped-def]
        from ds_reproducibility.drawing import install

        return install(model, ctx, section)

    def follow(model):  # type: ignore[no-untyped-def]
        from ds_reproducibility.drawing import follow_divided_layers

        return follow_divided_layers(model, ctx)

    if section.initialization:
        yield Transform(Phase.SPLIT, draw)
    if section.dropout:
        yield Transform(Phase.SHARD, install)
        yield Transform(Phase.RECOMPUTE, follow)


def ds_checkpoint_loaded(ctx: Context) -> None:
    """The engine's counters are the checkpoint's."""
    section = _section(ctx.config)
    if section is not None and section.dropout:
        from ds_reproducibility.drawing import BOOK

        ctx.stash[BOOK].forget()


def _section(config: RunConfig) -> Reproducibility | None:
    from ds_reproducibility.config import Reproducibility

    return config.section(Reproducibility)
