"""What this distribution offers to ds_core: the section ``eigenvalue`` (torch-free)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ds_core.config import Trait
from ds_core.entries import Phase, Transform
from ds_core.errors import Problem

if TYPE_CHECKING:
    from pydantic import BaseModel

    from ds_compression.eigenvalue.config import EigenvalueConfig
    from ds_core.config import RunConfig
    from ds_core.context import Context


def ds_config() -> type[BaseModel]:
    """The section ``eigenvalue``."""
    from ds_compression.eigenvalue.config import EigenvalueConfig

    return EigenvalueConfig


def ds_check(config: RunConfig) -> Iterable[Problem]:
    """Second derivatives need the weights of a whole model, in memory."""
    if _section(config) is None:
        return []
    found = []
    if config.has(Trait.DIVIDES_DEPTH):
        found.append(Problem("eigenvalue.enabled", "does not go with pipelines", "switch it off"))
    if config.has(Trait.RELEASES_WEIGHTS):
        why = (
            "does not go with zero_optimization.stage 3: the weights are sharded during second "
            "derivatives"
        )
        found.append(Problem("eigenvalue.enabled", why, "switch it off, or use a lower stage"))
    return found


def ds_transforms(ctx: Context) -> Iterable[Transform]:
    """Outermost: what the model gives must be its loss."""
    if (section := _section(ctx.config)) is None:
        return []

    def apply(model):  # type: ignore[no-untyped-def]
        from ds_compression.eigenvalue.sensitivity import follow

        return follow(model, section, ctx)

    return [Transform(Phase.COMPILE, apply)]


def ds_metrics(ctx: Context, step: int) -> Mapping[str, float]:
    """``Train/Eigenvalues/ModelBlockParam_0`` and so on, in steps that have found new ones."""
    if _section(ctx.config) is None:
        return {}
    from ds_compression.eigenvalue.sensitivity import metrics

    return metrics(ctx)


def ds_checkpointables(ctx: Context) -> Mapping[str, Any]:
    """The eigenvalues, and when each layer loses its next bit."""
    if _section(ctx.config) is None:
        return {}
    from ds_compression.eigenvalue.sensitivity import kept_state

    return kept_state(ctx)


def _section(config: RunConfig) -> EigenvalueConfig | None:
    from ds_compression.eigenvalue.config import EigenvalueConfig

    section = config.section(EigenvalueConfig)
    return section if section is not None and section.enabled else None
