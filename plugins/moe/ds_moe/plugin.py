"""What this distribution offers to ds_core (torch-free)."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

from ds_core.entries import Axis, Phase, Transform

if TYPE_CHECKING:
    from pydantic import BaseModel

    from ds_core.config import RunConfig
    from ds_core.context import Context


def ds_config() -> type[BaseModel]:
    from ds_moe.config import ExpertParallelConfig

    return ExpertParallelConfig


def ds_mesh_axes(config: RunConfig) -> Iterable[Axis]:
    section: Any = config.section("expert_parallel")
    return [Axis("ep", section.autoep_size if section.enabled else 1, inside="dp")]


def ds_param_axes(name: str, ctx: Context) -> Collection[str] | None:
    from ds_moe.autoep import HELD

    return ("ep",) if name in (ctx.stash.get(HELD) or ()) else None


def ds_transforms(ctx: Context) -> Iterable[Transform]:
    section: Any = ctx.config.section("expert_parallel")
    if not section.enabled:
        return []

    def apply(model: Any) -> Any:
        from ds_moe.autoep import replace

        return replace(model, ctx)

    return [Transform(Phase.SUBSTITUTE, apply)]
