"""What this distribution offers to ds_core: the section ``activation_checkpointing`` and its
transform (torch-free).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ds_core.entries import Phase, Transform

if TYPE_CHECKING:
    from pydantic import BaseModel

    from ds_activation_checkpointing.config import ActivationCheckpointingConfig
    from ds_core.context import Context


def ds_config() -> type[BaseModel]:
    """The section ``activation_checkpointing``."""
    from ds_activation_checkpointing.config import ActivationCheckpointingConfig

    return ActivationCheckpointingConfig


def ds_transforms(ctx: Context) -> Iterable[Transform]:
    """Blocks of the model are computed again in backward."""

    if (section := _section(ctx)) is None:
        return []

    def recompute(model):  # type: ignore[no-untyped-def]
        from ds_activation_checkpointing.setup import apply

        return apply(model, section, ctx)

    return [Transform(Phase.RECOMPUTE, recompute)]


def ds_step_begin(ctx: Context) -> None:
    """The first step has measured the blocks: choose by the budget. Collective."""
    from ds_activation_checkpointing.blocks import choose_by_budget

    section = _section(ctx)
    if section is not None and section.budget is not None:
        choose_by_budget(ctx, section.budget)


def _section(ctx: Context) -> ActivationCheckpointingConfig | None:
    from ds_activation_checkpointing.config import ActivationCheckpointingConfig

    return ctx.config.section(ActivationCheckpointingConfig)
