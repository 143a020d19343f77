"""From the section to a run: where inputs rest, which modules are recomputed, and who else recomputes in the model."""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ds_run_state.blocks import chosen, repeated_blocks
from ds_run_state.changes import changing
from torch import nn

from ds_activation_checkpointing.blocks import install
from ds_activation_checkpointing.checkpointing import Settings, checkpoint_with, forget_settings, use_settings
from ds_core import comm
from ds_core.errors import UsageError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ds_activation_checkpointing.config import ActivationCheckpointingConfig
    from ds_core.context import Context

__all__ = ["apply"]

log = logging.getLogger("ds_activation_checkpointing")

_KEY = "activation_checkpointing.modules"


def apply(model: nn.Module, section: ActivationCheckpointingConfig, ctx: Context) -> nn.Module:
    """The model, in which what the section says is computed again in backward."""
    settings = Settings.of(section, _group(section, ctx), ctx.accelerator)
    use_settings(settings)
    ctx.undo(functools.partial(forget_settings, settings))  # unless the program has made its own meanwhile
    wanted = section.recomputes
    with changing(model, ctx.undo):
        if getattr(model, "activation_checkpoint_func", "") is None:  # a PipelineModule, which recomputes by interval
            model.activation_checkpoint_func = functools.partial(checkpoint_with, settings)  # type: ignore[assignment]
        if wanted is None:
            _route(model, functools.partial(checkpoint_with, settings))
    if wanted is None:
        return model
    modules = _repeated(model, ctx) if wanted == "auto" else _named(model, wanted, ctx)
    install(model, modules, settings.options(policy=section.policy), ctx, section.budget is not None)
    return model


def _group(section: ActivationCheckpointingConfig, ctx: Context) -> ProcessGroup | None:
    """The ranks that keep a part each of every activation; None: each keeps all."""
    axis = section.partition_axis
    if not section.partition_activations:
        return None
    if not ctx.mesh.has(axis) or ctx.mesh.size(axis) == 1:
        log.info("partition_activations has no effect: no other rank along the mesh axis %r has an activation", axis)
        return None
    return ctx.mesh.group(axis)


def _route(model: nn.Module, function: Callable[..., Any]) -> None:
    """Let a transformers model that recomputes by itself do so with the settings of the section."""
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False) and hasattr(module, "_gradient_checkpointing_func"):
            module.__dict__["_gradient_checkpointing_func"] = function


# -- which modules ---------------------------------------------------------------------------------------------------


def _repeated(model: nn.Module, ctx: Context) -> dict[str, nn.Module]:
    """The repeated blocks of the model, also of one that is divided into stages with one block each."""
    if not ctx.mesh.has("pp") or ctx.mesh.size("pp") == 1:
        if not (found := repeated_blocks(model)):
            raise UsageError(f"{_KEY}: {type(model).__name__} has no repeated block; name the modules by class")
        return found
    held = [m for m in model.modules() if isinstance(m, (nn.ModuleList, nn.ModuleDict, nn.Sequential))]
    composed = [type(c).__name__ for m in held for c in m.children() if next(c.children(), None) is not None]
    everyone = comm.all_gather_json(composed)
    often = Counter(name for rank in ctx.mesh.ranks("pp") for name in everyone[rank])
    names = [name for name in dict.fromkeys(composed) if often[name] > 1]
    return chosen(model, names, _KEY) if names else {}


def _named(model: nn.Module, wanted: list[str], ctx: Context) -> dict[str, nn.Module]:
    """The modules that the config names. Each entry must fit on some rank: stages of a pipeline have different ones."""
    fits = {entry: error is None for entry in wanted for error in [_error(model, entry)]}
    everyone = comm.all_gather_json(fits) if ctx.world_size > 1 else [fits]
    for entry in wanted:
        if not any(rank[entry] for rank in everyone):
            error = _error(model, entry)
            assert error is not None
            raise error
    here = [entry for entry in wanted if fits[entry]]
    return chosen(model, here, _KEY) if here else {}


def _error(model: nn.Module, entry: str) -> UsageError | None:
    try:
        chosen(model, [entry], _KEY)
    except UsageError as error:
        return error
    return None
