"""Which gradients travel in a lower dtype under autocast: ``deepspeed.runtime.torch_autocast``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ds_core.precision import AUTOCAST_MODULES, WIRE_DTYPES, wire_dtypes
from ds_core.process import STATE

if TYPE_CHECKING:
    import torch

    from ds_core.engine import RunningEngine


def get_default_autocast_lower_precision_modules() -> list[str]:
    """Dotted names of the module classes whose gradients may travel in the autocast dtype."""
    return list(AUTOCAST_MODULES)


def init_autocast_params(
    engine: RunningEngine,
    dtype: torch.dtype,
    torch_autocast_lower_precision_safe_modules: list[str] | None = None,
) -> None:
    """Let the gradients of the named module classes travel in `dtype`; call it before the first
    backward.

    torch_autocast_lower_precision_safe_modules: dotted class names; None means the default list.
    """
    names = torch_autocast_lower_precision_safe_modules
    engine.ctx.stash[WIRE_DTYPES] = wire_dtypes(
        engine.module, dtype, AUTOCAST_MODULES if names is None else names
    )


def is_autocast_initialized() -> bool:
    """Whether gradients of an engine of this process travel as `torch_autocast` or
    `init_autocast_params` says.
    """
    return any(e.ctx.stash.get(WIRE_DTYPES) is not None for e in STATE.engines)
