"""What is left of an engine after `destroy`: its module and its counters; every other use is an error.

Its hooks are gone, so it would train each rank for itself. The class of the object is changed rather than asked for at
each call, which would cost every forward.
"""

from __future__ import annotations

import functools
from typing import Any

from ds_core.errors import UsageError

__all__ = ["end"]

# What may still be read, so that programs can report and hooks of a program that ends do not fail.
LEFT = {"module", "destroy", "config", "ctx", "serial", "global_rank", "world_size", "should_stop"} | {
    "micro_steps",
    "global_steps",
    "global_samples",
    "skipped_steps",
}


def end(engine: Any) -> None:
    """Make every use of `engine` an error but for `LEFT`."""
    kind: Any = type(engine)
    engine.__class__ = _ended(kind)


@functools.cache
def _ended(kind: Any) -> type:
    return type(kind.__name__, (kind,), {"__getattribute__": _refuse})


def _refuse(self: Any, name: str) -> Any:
    if name in LEFT or (name.startswith("__") and name.endswith("__")):
        return object.__getattribute__(self, name)
    raise UsageError(
        f"engine.{name}: this engine was destroyed (by destroy(), or by a second initialize on its model); use the "
        "engine that initialize made last, or the plain engine.module"
    )
