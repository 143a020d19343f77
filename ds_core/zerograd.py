"""``engine.optimizer.zero_grad()`` and ``engine.module.zero_grad()`` drop the gradients that the partitioner holds.

Their own methods only see ``param.grad``, and gradients may lie elsewhere: in buckets, in parts, in fp32. torch has no
hook for it, so an attribute of the instance stands before the class's method until the engine is destroyed. A copy of
the module by ``copy.deepcopy`` or pickle belongs to no engine, and its `zero_grad` is the class's.
"""

from __future__ import annotations

import logging
import types
from typing import Any

from ds_core.process import STATE, tell_once

__all__ = ["watch_zero_grad", "unwatch_zero_grad"]

log = logging.getLogger("ds_core.engine")


def zero_grad(self: Any, *args: Any, **kwargs: Any) -> None:
    """`zero_grad` of an engine's optimizer or module. Every rank calls it."""
    type(self).zero_grad(self, *args, **kwargs)
    for engine in STATE.engines:
        if engine.optimizer is self or engine.module is self:
            engine.drop_gradients()
            if not (args[0] if args else kwargs.get("set_to_none", True)):
                tell_once(log, logging.INFO, "zero_grad(set_to_none=False): gradients are dropped, not filled with 0")


def watch_zero_grad(*owners: Any) -> None:
    """Let ``zero_grad`` of each of `owners`, an engine's optimizer and module, drop the engine's gradients."""
    for owner in owners:
        if owner is not None:
            owner.__dict__.setdefault("zero_grad", types.MethodType(zero_grad, owner))


def unwatch_zero_grad(*owners: Any) -> None:
    """The reverse of `watch_zero_grad`."""
    for owner in owners:
        method = getattr(owner, "__dict__", {}).get("zero_grad")
        if isinstance(method, types.MethodType) and method.__func__ is zero_grad:
            del owner.__dict__["zero_grad"]
