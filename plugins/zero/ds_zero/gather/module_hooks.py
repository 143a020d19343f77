"""Hooks of modules with sharded weights: apply, load_state_dict, state_dict, forward, deepcopy.

Where torch has no hook (``apply`` and ``__deepcopy__``), an attribute of the instance does it.
`remove_hooks` removes all of them.
"""

from __future__ import annotations

import contextlib
import copy
import enum
import logging
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from ds_core import comm
from ds_core.errors import UsageError
from ds_core.process import STATE, log_once
from ds_zero.gather.gathered_parameters import GatheredParameters
from ds_zero.gather.on_access import GatherOnAccess, gathering_on_access
from ds_zero.gather.weights import WeightHandle, agree, handle_of, handles_of
from ds_zero.init.sharded_param import unshard_module

log = logging.getLogger("ds_zero")

_HANDLES = "_ds_handles"
"""The attribute of a module that has torch's handles of its hooks."""

_NOT_SAVED = (
    "state_dict(): sharded weights are empty tensors in it (the first is %r), because their "
    "values are spread over ranks. For full weights use engine.save_checkpoint or "
    "engine.save_16bit_model, or call state_dict() on every rank inside "
    "ds_zero.GatheredParameters(module), which takes the memory of the unsharded model. For "
    "torch's own tools the package dscore-dtensor gives DTensors: engine.state_dict()"
)
_NOT_LOADED = (
    "load_state_dict(): the state dict has a tensor without values for a sharded weight (the "
    "first is %r), as state_dict() gives it at stage 3; such weights stay as they are"
)


def install_hooks(module: nn.Module, *, apply: bool, engine: bool) -> None:
    """Install the hooks of `module`, whose own weights may be sharded.

    apply: ``module.apply(fn)`` gathers.
    engine: there is an engine, so forward is allowed, and deepcopy gives a plain module.
    """
    # An engine's take the place of those that `Init` has installed.
    if engine:
        remove_hooks(module)
    elif _HANDLES in module.__dict__:
        return
    handles = [
        module.register_state_dict_post_hook(_put_placeholders),
        module.register_load_state_dict_pre_hook(_load),
    ]
    if not engine:
        handles.append(module.register_forward_pre_hook(_refuse_forward, prepend=True))
    module.__dict__[_HANDLES] = handles
    # What an `apply` of the class itself does is unknown, so it is left alone.
    if apply and type(module).apply is nn.Module.apply:
        module.__dict__["apply"] = types.MethodType(_apply, module)
    if engine:
        module.__dict__["__deepcopy__"] = types.MethodType(_deepcopy, module)


def remove_hooks(module: nn.Module) -> None:
    """Undo `install_hooks`."""
    for handle in module.__dict__.pop(_HANDLES, ()):
        handle.remove()
    for name, function in (("apply", _apply), ("__deepcopy__", _deepcopy)):
        # Only ours: the user may have set another one on the instance meanwhile.
        method = module.__dict__.get(name)
        if isinstance(method, types.MethodType) and method.__func__ is function:
            del module.__dict__[name]


def materialize(module: nn.Module) -> None:
    """Make a module that was built under `Init` a plain one, with its full weights. Collective."""
    unshard_module(module)
    for submodule in module.modules():
        remove_hooks(submodule)


def _apply(self: nn.Module, fn: Callable[[nn.Module], None]) -> nn.Module:
    """`nn.Module.apply` with each module's own parameters unsharded during `fn`.

    What the first rank writes counts. Parameters of other modules are gathered when `fn` accesses
    them.
    """
    # Children first, as torch does.
    for child in self.children():
        child.apply(fn)
    own = _not_gathered(self._parameters.values())
    with GatheredParameters(own, modifier_rank=0), GatherOnAccess():
        fn(self)
    return self


def _not_gathered(params: Iterable[nn.Parameter | None]) -> list[nn.Parameter]:
    """ZeRO's of `params`, but for those that a `GatheredParameters` around the call has gathered:
    they are unsharded, and its to write back.
    """
    return [handle.param for handle in handles_of(params) if not handle.in_context]


def _deepcopy(self: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """``copy.deepcopy`` of an engine's module or submodule: a plain module with the full weights.

    Collective at stage 3: every rank copies. The user's hooks are copied as torch does; ZeRO's are
    not.
    """
    # Of every engine that has a part of the module: hooks refer to the engine, which would be
    # copied as well.
    mine = set(self.modules())
    engines = [e for e in STATE.engines if not mine.isdisjoint(e.module.modules())]
    with contextlib.ExitStack() as stack:
        # By their serial numbers, which are equal on all ranks: removing hooks may be collective.
        for engine in sorted(engines, key=lambda e: e.serial):
            if (hooks_off := getattr(engine.partitioner, "module_hooks_removed", None)) is not None:
                stack.enter_context(hooks_off())
        # Without a modifier: the copies are written to, not these.
        stack.enter_context(GatheredParameters(_not_gathered(self.parameters())))
        return copy.deepcopy(self, memo)


@contextlib.contextmanager
def hooks_removed(module: nn.Module) -> Iterator[None]:
    """Inside, `module` (an engine's) and its submodules have none of these hooks."""
    hooked = {m: "apply" in m.__dict__ for m in module.modules() if _HANDLES in m.__dict__}
    for submodule in hooked:
        remove_hooks(submodule)
    try:
        yield
    finally:
        for submodule, apply in hooked.items():
            install_hooks(submodule, apply=apply, engine=True)


def _put_placeholders(module: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
    """Put an empty tensor in the place of each of the module's sharded weights.

    Whether or not it is gathered now: what a state dict has must not depend on what was prefetched.
    """
    # Code inside `GatherOnAccess` gets weights with their values, by a state dict too.
    if gathering_on_access():
        return
    for name, param in module._parameters.items():
        handle = handle_of(param)
        key = prefix + name
        # `held`: by a `GatheredParameters`, in which a state dict is complete. The parameter itself
        # is in it with keep_vars.
        if (
            handle is None
            or not handle.sharded_at_rest
            or handle.held
            or state_dict.get(key) is param
        ):
            continue
        state_dict[key] = torch.empty(0, dtype=handle.param.dtype, device=handle.device)
        _warn_once(handle, _NOT_SAVED, key)


def _load(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: dict[str, Any],
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    """Load the module's own weights, instead of torch.

    In `state_dict` they are replaced by the parameters, so that torch copies nothing. There is no
    collective for a weight that is not in `state_dict`: loaders that read one file of several at a
    time call this on the first rank only.
    """
    for name, param in module._parameters.items():
        handle = handle_of(param)
        key = prefix + name
        value = state_dict.get(key)
        # In a `GatheredParameters` torch copies into the unsharded weight.
        if (
            handle is None
            or handle.in_context
            or not isinstance(value, torch.Tensor)
            or value is param
        ):
            continue
        # Into a replicated weight torch's own copy is right; with `assign` it would put another
        # tensor in the place of the one that the engine trains.
        if not handle.sharded_at_rest and not local_metadata.get("assign_to_params_buffers"):
            continue
        # Loading is collective, so all ranks must do the same, whatever each one's state dict has.
        given = _classify(handle, value)
        found = _agree(handle, given)
        if found is _Given.MISFIT:
            errors.append(
                f"size mismatch for {key}: its shape is {tuple(handle.shape)} in the model and "
                f"{tuple(value.shape)} in the state dict of this rank; each rank gives its full "
                "weight, or a placeholder"
            )
        elif found is _Given.FULL:
            # On other ranks than the first it is only the place of the first one's values.
            full = given is _Given.FULL
            handle.assign(
                value.detach() if full else torch.empty(handle.shape, dtype=handle.param.dtype)
            )
        else:
            _warn_once(handle, _NOT_LOADED, key)
        state_dict[key] = param


def _warn_once(handle: WeightHandle, message: str, key: str) -> None:
    """On the first of the ranks that share the weight: the others would only say the same."""
    if comm.rank() == handle.ranks[0]:
        log_once(log, logging.WARNING, message, key)


class _Given(enum.IntEnum):
    """What the state dict has for a sharded weight; the largest value of all ranks counts."""

    # No values: an empty tensor, or one on the meta device.
    PLACEHOLDER = 0
    # The unsharded weight.
    FULL = 1
    # A tensor of another shape.
    MISFIT = 2


def _classify(handle: WeightHandle, value: torch.Tensor) -> _Given:
    """What `value` is on this rank."""
    if value.shape == handle.shape:
        return _Given.PLACEHOLDER if value.is_meta else _Given.FULL
    return _Given.PLACEHOLDER if value.shape == (0,) else _Given.MISFIT


def _agree(handle: WeightHandle, given: _Given) -> _Given:
    """MISFIT where any rank has one, so that all refuse; else what the first rank has.

    Collective over the ranks that share the weight.
    """
    # The values of the first rank count, so what the others have matters only if it is wrong.
    counts = given is _Given.MISFIT or comm.rank() == handle.ranks[0]
    return _Given(*agree([handle], [given if counts else _Given.PLACEHOLDER]))


def _refuse_forward(module: nn.Module, args: Any) -> None:
    if gathering_on_access():
        return
    for param in module._parameters.values():
        handle = handle_of(param)
        if handle is not None and handle.is_sharded:
            raise UsageError(
                f"{type(module).__name__}: its weights were sharded by ds_zero.Init; give the "
                "model to ds_core.initialize with zero_optimization.stage 3 (1 and 2 will do), or "
                "gather them with ds_zero.GatheredParameters"
            )
