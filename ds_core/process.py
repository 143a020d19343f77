"""What belongs to the process rather than to one engine; the only module-level state besides the plugin registry.

`reset` puts everything back, so that tests (and notebooks) can start afresh.
"""

from __future__ import annotations

import gc
import logging
import sys
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ds_core.errors import UsageError

if TYPE_CHECKING:
    from torch import nn

    from ds_core.joint import Joint
    from ds_core.partition import Partitioner
    from ds_core.running import RunningEngine

log = logging.getLogger("ds_core")

__all__ = ["STATE", "ProcessState", "Taken", "make_free", "reset", "tell_once"]


@dataclass(frozen=True, slots=True)
class Taken:
    """Who has a model; none of it is kept alive by this."""

    engine: weakref.ref[RunningEngine]
    module: weakref.ref[nn.Module]


@dataclass
class ProcessState:
    """engines: those alive. made: how many there were. told: messages that need saying only once.

    driver: the partitioner of the engine whose ``backward`` runs, None in a plain ``loss.backward()``. factor: what
    that engine multiplies losses by (loss scale over accumulation steps).
    attached: the partitioners of engines that have begun and were not destroyed, by the engine's number.
    world: the process group that they talk on.
    joint: ends the backwards of several engines. taken: the partitioners that have hooks on a model, with both.
    """

    engines: weakref.WeakSet[RunningEngine] = field(default_factory=weakref.WeakSet)
    made: int = 0
    told: set[str] = field(default_factory=set)
    driver: Partitioner | None = None
    factor: float = 1.0
    attached: dict[int, weakref.ref[Partitioner]] = field(default_factory=dict)
    world: weakref.ref[Any] | None = None
    joint: Joint | None = None
    taken: weakref.WeakKeyDictionary[Partitioner, Taken] = field(default_factory=weakref.WeakKeyDictionary)

    def next_serial(self) -> int:
        """Numbers engines, so that all ranks can walk through them in one order."""
        self.made += 1
        return self.made


STATE = ProcessState()
_ELSEWHERE = (
    ("ds_core.comm.log", "reset"),
    ("ds_core.comm.guard", "reset"),
    ("ds_core.comm.shared", "reset"),
    ("ds_core.comm.start", "stop_lone"),
    ("ds_core.accelerator.select", "reset_accelerator"),
    ("ds_core.plugins", "reset_discovery"),
)


def tell_once(logger: logging.Logger, level: int, message: str, *arguments: Any) -> None:
    """Log `message` the first time it is said in this process."""
    if message not in STATE.told:
        STATE.told.add(message)
        logger.log(level, message, *arguments)


def make_free(model: nn.Module) -> None:
    """See that no other engine trains (parts of) `model`; hooks that a forgotten engine left are removed. Collective.

    An engine of this very model, as a second ``initialize`` in a notebook finds it, is destroyed, with a warning.
    Raises UsageError while an engine of a part of it, or of something around it, is in use.
    """
    mine = {p: name for name, p in model.named_parameters() if p.requires_grad}
    if _in_use(model, mine):
        gc.collect()  # an engine in a cycle of references lives on for a while though nobody can reach it
    for taken in list(STATE.taken.values()):
        if taken.module() is model and (engine := taken.engine()) is not None:
            log.warning(
                "initialize was called again on a model whose engine is in use; that engine is destroyed, with its "
                "optimizer states (call its destroy() first to avoid this warning)"
            )
            engine.destroy()
    if what := _in_use(model, mine):
        raise UsageError(
            f"{what} belongs to the engine that an earlier initialize made, which is still in use, and two engines "
            "cannot train the same weights; call destroy() on that engine first"
        )
    for partitioner, taken in list(STATE.taken.items()):
        if _shared(taken, model, mine):
            partitioner.detach()
            del STATE.taken[partitioner]


def _in_use(model: nn.Module, trainable: dict[nn.Parameter, str]) -> str:
    found = (_shared(taken, model, trainable) for taken in STATE.taken.values() if taken.engine() is not None)
    return next(filter(None, found), "")


def _shared(taken: Taken, model: nn.Module, trainable: dict[nn.Parameter, str]) -> str:
    """What of `model` is taken, in words; "" for nothing."""
    module = taken.module()
    if module is None or module is model:
        return "" if module is None else "the model"
    name = next((trainable[p] for p in module.parameters() if p in trainable), None)
    return "" if name is None else f"the parameter {name!r} of the model"


def reset() -> None:
    """Destroy live engines and forget the accelerator, the comms log and what plugins were discovered."""
    for engine in sorted(STATE.engines, key=lambda e: e.serial):
        engine.destroy()
    STATE.engines.clear()
    STATE.taken.clear()
    STATE.attached.clear()
    STATE.joint = None
    STATE.told.clear()
    for module, function in _ELSEWHERE:
        if module in sys.modules:  # what was never imported holds nothing
            getattr(sys.modules[module], function)()
