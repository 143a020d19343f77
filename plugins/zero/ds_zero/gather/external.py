"""Registration of parameters that a module's forward uses and another module owns."""

from __future__ import annotations

from typing import Any

from torch import nn

from ds_core.errors import UsageError
from ds_core.process import STATE
from ds_zero.gather.weights import owner_of

_REGISTERED = "_ds_external_parameters"
"""The attribute of a module that has its registered parameters; `initialize` reads them."""


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Make stage 3 gather `parameter`, which another module owns, for ``module.forward``.

    Call it before or after `initialize`. It is not needed for a parameter that is read as
    ``other.weight`` inside a forward, or that a module returns. Raises UsageError when `module` is
    not a module or `parameter` not a parameter, and, once there is an engine, when no engine has
    the parameter; `initialize` checks those registered before.
    """
    _check(module, parameter)
    # Before `initialize` no engine has the parameter yet; it is known to be a mistake only if the
    # module is in an engine already.
    owner = owner_of(parameter)
    if owner is None and in_engine(module):
        raise UsageError(
            f"register_external_parameter: the parameter of shape {tuple(parameter.shape)} belongs "
            "to no module that was given to initialize"
        )
    registered = externals(module)
    # By identity: `in` would compare the tensors by value.
    if not any(p is parameter for p in registered):
        module.__dict__.setdefault(_REGISTERED, []).append(parameter)
    if owner is not None:
        owner[0].add_external(module, parameter)


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Undo `register_external_parameter`.

    Raises UsageError when the parameter was not registered.
    """
    _check(module, parameter)
    registered = externals(module)
    if not any(p is parameter for p in registered):
        raise UsageError(
            f"unregister_external_parameter: the parameter of shape {tuple(parameter.shape)} was "
            f"not registered with this {type(module).__name__}"
        )
    module.__dict__[_REGISTERED] = [p for p in registered if p is not parameter]
    owner = owner_of(parameter)
    if owner is not None:
        owner[0].remove_external(module, parameter)


def externals(module: nn.Module) -> list[nn.Parameter]:
    """The parameters registered with `module`."""
    found: list[nn.Parameter] = module.__dict__.get(_REGISTERED, [])
    return found


def in_engine(module: nn.Module) -> bool:
    """Whether `module` belongs to a live engine's model."""
    return any(module is m for e in STATE.engines for m in e.module.modules())


def _check(module: Any, parameter: Any) -> None:
    if not isinstance(module, nn.Module):
        raise UsageError(
            f"external parameters: the first argument must be a module, not {type(module).__name__}"
        )
    if not isinstance(parameter, nn.Parameter):
        raise UsageError(
            "external parameters: the second argument must be an nn.Parameter, not "
            f"{type(parameter).__name__}"
        )
