"""Parameters that a module's forward uses though another module owns them: registered by hand."""

from __future__ import annotations

from typing import Any

from torch import nn

from ds_core.errors import UsageError
from ds_core.process import STATE
from ds_zero.weights import engine_of

__all__ = ["externals", "register_external_parameter", "unregister_external_parameter"]

_KEPT = "_ds_external_parameters"


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """``module.forward`` will use `parameter`, which another module owns: stage 3 gathers it around `module`.

    Before or after `initialize`. A parameter that is read as ``other.weight`` inside a forward, or that a module
    returns, is found without it. Raises UsageError when `module` is no module or `parameter` no parameter, and, once
    there is an engine, when no engine has the parameter; `initialize` checks those that were registered before.
    """
    _check(module, parameter)
    owner = engine_of(parameter)
    if owner is None and in_engine(module):
        raise UsageError(
            f"register_external_parameter: the parameter of shape {tuple(parameter.shape)} belongs to no module that "
            "was given to initialize"
        )
    kept = externals(module)
    if not any(p is parameter for p in kept):
        module.__dict__.setdefault(_KEPT, []).append(parameter)
    if owner is not None:
        owner[0].add_external(module, parameter)


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """The reverse of `register_external_parameter`. Raises UsageError when it was not registered."""
    _check(module, parameter)
    kept = externals(module)
    if not any(p is parameter for p in kept):
        raise UsageError(
            f"unregister_external_parameter: the parameter of shape {tuple(parameter.shape)} was not registered with "
            f"this {type(module).__name__}"
        )
    module.__dict__[_KEPT] = [p for p in kept if p is not parameter]
    owner = engine_of(parameter)
    if owner is not None:
        owner[0].remove_external(module, parameter)


def externals(module: nn.Module) -> list[nn.Parameter]:
    """What was registered with `module`."""
    found: list[nn.Parameter] = module.__dict__.get(_KEPT, [])
    return found


def in_engine(module: nn.Module) -> bool:
    """Whether `module` is part of a live engine's model."""
    return any(module is m for e in STATE.engines for m in e.module.modules())


def _check(module: Any, parameter: Any) -> None:
    if not isinstance(module, nn.Module):
        raise UsageError(f"external parameters: the first argument must be a module, not {type(module).__name__}")
    if not isinstance(parameter, nn.Parameter):
        raise UsageError(
            f"external parameters: the second argument must be an nn.Parameter, not {type(parameter).__name__}"
        )
