"""What this distribution offers to ds_core: the section ``zero_optimization`` and its partitioner (torch-free)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import BaseModel

    from ds_core.config import RunConfig
    from ds_core.context import Context
    from ds_core.errors import Problem
    from ds_core.partition import Partitioner
    from ds_core.plugins import Plugins

__all__ = ["ds_check", "ds_config", "ds_partitioner"]


def ds_config() -> type[BaseModel]:
    """The section ``zero_optimization``."""
    from ds_zero.config import ZeroConfig

    return ZeroConfig


def ds_check(config: RunConfig, plugins: Plugins) -> Iterable[Problem]:
    """Offload that the stage does not have, and stores that nobody offers."""
    from ds_zero.config import ZeroConfig
    from ds_zero.rules import offload_problems

    section = config.section("zero_optimization")
    return offload_problems(section, plugins) if isinstance(section, ZeroConfig) else ()


def ds_partitioner(ctx: Context) -> Partitioner | None:
    """The partitioner of the config's stage; None for stage 0."""
    from ds_zero.config import ZeroConfig

    section = ctx.config.section("zero_optimization")
    if not isinstance(section, ZeroConfig) or section.stage == 0:
        return None
    if section.stage == 3:
        from ds_zero.stage3 import Stage3

        return Stage3(ctx, section)
    from ds_zero.stage12 import Stage12

    return Stage12(ctx, section)
