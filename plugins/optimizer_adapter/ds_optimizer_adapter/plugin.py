"""What this distribution offers to ds_core: optimizers of the package pytorch_optimizer by name, and
the section ``optimizer_adapter`` (torch-free).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from ds_core.entries import OptimizerEntry, Phase, Transform
from ds_core.errors import ConfigError, Problem
from ds_optimizer_adapter.names import ELEMENTWISE, KEY, PACKAGE

if TYPE_CHECKING:
    from pydantic import BaseModel
    from torch import nn

    from ds_core.config import RunConfig
    from ds_core.context import Context
    from ds_core.plugins import Plugins
    from ds_optimizer_adapter.config import OptimizerAdapter

OPTIMIZERS: Mapping[str, OptimizerEntry] = {
    f"{PACKAGE}.{name}": OptimizerEntry(f"{PACKAGE}:{name}") for name in ELEMENTWISE
}


def ds_config() -> type[BaseModel]:
    """The section ``optimizer_adapter``."""
    from ds_optimizer_adapter.config import OptimizerAdapter

    return OptimizerAdapter


def ds_optimizers() -> Mapping[str, OptimizerEntry]:
    """The names that need no word of the user's on their grain."""
    return OPTIMIZERS


def ds_check(config: RunConfig, plugins: Plugins) -> Iterable[Problem]:
    """A grain that a measurement refutes, or that is declared already."""
    from ds_optimizer_adapter.checking import problems

    return problems(config, plugins, _section(config), OPTIMIZERS)


def ds_transforms(ctx: Context) -> Iterable[Transform]:
    """Takes the stated grain for the run's; the model stays as it is."""
    section = _section(ctx.config)
    if section is None:
        return

    def state(model: nn.Module) -> nn.Module:
        # `ds_check` has seen an optimizer of the config, and not what is given to `initialize`.
        if ctx.config.core.optimizer is None and ctx.grain is not None:
            why = f"the optimizer that initialize was given has declared {ctx.grain!r}"
            raise ConfigError([Problem(KEY, why, "remove the section optimizer_adapter")])
        # Before the partitioner is made, which asks for it.
        ctx.grain = section.grain
        return model

    yield Transform(Phase.SPLIT, state)


def _section(config: RunConfig) -> OptimizerAdapter | None:
    from ds_optimizer_adapter.config import OptimizerAdapter

    return config.section(OptimizerAdapter)
