"""What this distribution offers to ds_core: the section ``zero_optimization`` and its partitioner (torch-free)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import BaseModel

    from ds_core.context import Context
    from ds_core.partition import Partitioner

__all__ = ["ds_config", "ds_partitioner"]


def ds_config() -> type[BaseModel]:
    """The section ``zero_optimization``."""
    from ds_zero.config import ZeroConfig

    return ZeroConfig


def ds_partitioner(ctx: Context) -> Partitioner | None:
    """The partitioner of the config's stage; None for stage 0."""
    from ds_zero.config import ZeroConfig

    section = ctx.config.section("zero_optimization")
    if not isinstance(section, ZeroConfig):
        return None
    if section.stage == 0:
        from ds_zero.manners import settle

        if ctx.module is not None:
            settle(ctx.module)  # it may have been built under ds_zero.Init
        return None
    if section.stage == 3:
        from ds_zero.stage3 import Stage3

        return Stage3(ctx, section)
    from ds_zero.stage12 import Stage12

    return Stage12(ctx, section)
