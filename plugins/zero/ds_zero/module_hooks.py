"""How a module with partitioned weights answers torch's own calls: apply, load_state_dict, state_dict, forward, and
``copy.deepcopy``.

Torch's hooks serve, and for `apply` and ``__deepcopy__``, which have none, an attribute of each instance; `unteach`
takes all away again.
"""

from __future__ import annotations

import contextlib
import copy
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ds_core.errors import UsageError
from ds_core.process import STATE
from ds_zero.gather_on_access import Touching, touching
from ds_zero.gathered_parameters import GatheredParameters
from ds_zero.sharded_param import restore
from ds_zero.weights import home_of

__all__ = ["bare", "settle", "teach", "unteach"]

_HANDLES = "_ds_handles"


def teach(module: nn.Module, *, apply: bool, engine: bool) -> None:
    """Let `module`, which may hold partitioned weights of its own, behave.

    apply: ``module.apply(fn)`` gathers. engine: there is an engine, so forward may be called, and copies are plain.
    """
    if engine:
        unteach(module)
    elif _HANDLES in module.__dict__:
        return
    handles = [
        module.register_state_dict_pre_hook(_refuse_empty),
        module.register_load_state_dict_pre_hook(_load),
    ]
    if not engine:
        handles.append(module.register_forward_pre_hook(_refuse_forward, prepend=True))
    module.__dict__[_HANDLES] = handles
    if apply and type(module).apply is nn.Module.apply:
        module.__dict__["apply"] = types.MethodType(_apply, module)
    if engine:
        module.__dict__["__deepcopy__"] = types.MethodType(_deepcopy, module)


def unteach(module: nn.Module) -> None:
    """The reverse of `teach`."""
    for handle in module.__dict__.pop(_HANDLES, ()):
        handle.remove()
    for name, function in (("apply", _apply), ("__deepcopy__", _deepcopy)):
        method = module.__dict__.get(name)
        if isinstance(method, types.MethodType) and method.__func__ is function:
            del module.__dict__[name]


def settle(module: nn.Module) -> None:
    """Make a module that was built under `Init` an ordinary one. Collective."""
    restore(module)
    for part in module.modules():
        unteach(part)


def _apply(self: nn.Module, fn: Callable[[nn.Module], None]) -> nn.Module:
    """`nn.Module.apply`, with each module's own parameters whole while `fn` has it; what the first rank wrote counts.

    Parameters of other modules that `fn` touches become whole too.
    """
    for child in self.children():
        child.apply(fn)
    own = [p for p in self._parameters.values() if (home := home_of(p)) is not None and not home.entered]
    with GatheredParameters(own, modifier_rank=0), Touching():
        fn(self)
    return self


def _deepcopy(self: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """``copy.deepcopy`` of (a part of) an engine's module: an ordinary module, which has the whole weights.

    Collective at stage 3: every rank copies. Hooks of the user's are copied, as torch does; those of ZeRO are not.
    """
    mine = set(self.modules())
    engines = [e for e in STATE.engines if not mine.isdisjoint(e.module.modules())]
    with contextlib.ExitStack() as stack:
        for engine in sorted(engines, key=lambda e: e.serial):
            if (bare := getattr(engine.partitioner, "bare", None)) is not None:
                stack.enter_context(bare())
        inside = [p for p in self.parameters() if (home := home_of(p)) is not None and not home.entered]
        stack.enter_context(GatheredParameters(inside))
        return copy.deepcopy(self, memo)


@contextlib.contextmanager
def bare(module: nn.Module) -> Iterator[None]:
    """Inside, the modules below `module`, which an engine has, answer as torch's own do."""
    taught = {part: "apply" in part.__dict__ for part in module.modules() if _HANDLES in part.__dict__}
    for part in taught:
        unteach(part)
    try:
        yield
    finally:
        for part, apply in taught.items():
            teach(part, apply=apply, engine=True)


def _refuse_empty(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    """A state dict of empty tensors would be found out when it is loaded, which is too late."""
    if keep_vars or touching():
        return
    for name, param in module._parameters.items():
        home = home_of(param)
        if home is not None and home.away:
            raise UsageError(
                f"state_dict(): parameter {prefix + name!r} is partitioned over ranks; use engine.save_checkpoint or "
                "engine.save_16bit_model, or call it on every rank inside ds_zero.GatheredParameters(module), which "
                "takes the memory of the whole model"
            )


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
    """Put the module's own values where they belong; torch then finds the parameters themselves, and nothing to do."""
    for name, param in module._parameters.items():
        home, key = home_of(param), prefix + name
        value = state_dict.get(key)
        if home is None or home.entered or not isinstance(value, torch.Tensor) or value is param:
            continue
        if not home.apart and not local_metadata.get("assign_to_params_buffers"):
            continue  # whole on every rank: torch's own copy will do
        if value.shape != home.shape:
            errors.append(
                f"size mismatch for {key}: its shape is {tuple(home.shape)} in the model and {tuple(value.shape)} in "
                "the state dict"
            )
        else:
            home.assign(value.detach())
        state_dict[key] = param


def _refuse_forward(module: nn.Module, args: Any) -> None:
    if touching():
        return
    for param in module._parameters.values():
        home = home_of(param)
        if home is not None and home.away:
            raise UsageError(
                f"{type(module).__name__}: its weights were partitioned by ds_zero.Init; give the model to "
                "ds_core.initialize with zero_optimization.stage 3 (1 and 2 will do), or gather them with "
                "ds_zero.GatheredParameters"
            )
