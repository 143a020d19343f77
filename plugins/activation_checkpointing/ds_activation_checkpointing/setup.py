"""From the section to a run: where inputs are kept, which modules are recomputed, and which of the
model's own checkpoints follow the section.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ds_run_state.blocks import find_blocks
from ds_run_state.changes import changing
from torch import nn

from ds_activation_checkpointing.blocks import install
from ds_activation_checkpointing.deepspeed.checkpointing import (
    Settings,
    checkpoint_with,
    forget_settings,
    use_settings,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ds_activation_checkpointing.config import ActivationCheckpointingConfig
    from ds_core.context import Context

log = logging.getLogger("ds_activation_checkpointing")

_KEY = "activation_checkpointing.modules"


def apply(model: nn.Module, section: ActivationCheckpointingConfig, ctx: Context) -> nn.Module:
    """The model, in which what the section says is computed again in backward."""
    settings = Settings.of(section, _group(section, ctx), ctx.accelerator)
    use_settings(settings)
    # unless the program has made its own meanwhile
    ctx.undo(functools.partial(forget_settings, settings))
    wanted = section.recomputes
    with changing(model, ctx.undo):
        # a PipelineModule, which recomputes by interval
        if getattr(model, "activation_checkpoint_func", "") is None:
            model.activation_checkpoint_func = functools.partial(checkpoint_with, settings)  # type: ignore[assignment]
        if wanted is None:
            _route(model, functools.partial(checkpoint_with, settings))
    if wanted is None:
        return model
    named = () if isinstance(wanted, str) else wanted
    modules = find_blocks(model, named, _KEY, "name the modules by class")
    install(
        model, modules, settings.options(policy=section.policy), ctx, section.budget is not None
    )
    return model


def _group(section: ActivationCheckpointingConfig, ctx: Context) -> ProcessGroup | None:
    """The ranks that keep a part each of every activation; None: each keeps all."""
    axis = section.partition_axis
    if not section.partition_activations:
        return None
    if not ctx.mesh.has(axis) or ctx.mesh.size(axis) == 1:
        log.info(
            "partition_activations has no effect: no other rank along the mesh axis %r has an "
            "activation",
            axis,
        )
        return None
    return ctx.mesh.group(axis)


def _route(model: nn.Module, function: Callable[..., Any]) -> None:
    """Let a transformers model that recomputes by itself do so with the settings of the section."""
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False) and hasattr(
            module, "_gradient_checkpointing_func"
        ):
            module.__dict__["_gradient_checkpointing_func"] = function
