"""The compile passes ``z1`` and ``z3``: dscore-compile compiles block by block, and ZeRO works between
the blocks.

Gradients are reduced while the backward of the next block runs, and weights are gathered ahead of
the block that needs them, so nothing is to be changed in a graph. Naming a pass asserts the stage.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ds_core.errors import UsageError
from ds_zero.config import ZeroConfig

if TYPE_CHECKING:
    from ds_core.context import Context


def z1(ctx: Context) -> None:
    """Reduction of gradients beside backward, at stages 1 and 2."""
    _check(ctx, "z1", (1, 2))


def z3(ctx: Context) -> None:
    """Gathers ahead of blocks, at stage 3."""
    _check(ctx, "z3", (3,))


def _check(ctx: Context, name: str, stages: tuple[int, ...]) -> None:
    section = ctx.config.section(ZeroConfig)
    stage = section.stage if section is not None else 0
    if stage not in stages:
        wanted = " or ".join(map(str, stages))
        raise UsageError(
            f"compile.passes: {name!r} is for zero_optimization.stage {wanted}, and the stage is "
            f"{stage}; remove it or leave passes out"
        )
