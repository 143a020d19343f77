"""State of the process rather than of one engine.

`reset` clears it, so that tests and notebooks start afresh.
"""

from __future__ import annotations

import logging
import sys
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ds_core.engine import RunningEngine
    from ds_core.gradients import GradientHooks

log = logging.getLogger("ds_core")


@dataclass
class ProcessState:
    """The engines of this process, and what it has logged."""

    told: set[str] = field(default_factory=set)
    """Messages that are logged only once."""

    # -- engines, by serial number
    members: dict[int, weakref.ref[GradientHooks]] = field(default_factory=dict)
    """The hooks on gradients of those that were not destroyed. One that was garbage-collected
    stays, since that happens on each rank by itself."""
    made: int = 0
    """The last number that was given."""

    # -- their process group
    world: weakref.ref[Any] | None = None
    """That of the engines from the number `first` on."""
    first: int = 1
    """Nothing of earlier engines can be reduced any more: their process group is gone."""

    @property
    def engines(self) -> list[RunningEngine]:
        """Those that are alive and were not destroyed, in the order in which they were made."""
        members = (ref() for ref in self.members.values())
        return [engine for m in members if m is not None and (engine := m.engine()) is not None]

    def enter(self, hooks: GradientHooks) -> int:
        """The serial number of a new engine, by which all ranks walk through engines in one
        order."""
        self.made += 1
        self.members[self.made] = weakref.ref(hooks)
        return self.made

    def follow(self, world: Any) -> None:
        """Note the present process group."""
        if (self.world() if self.world is not None else None) is not world:
            self.world = weakref.ref(world) if world is not None else None
            self.first = self.made + 1

    def present(self) -> list[GradientHooks | None]:
        """Of the engines on the present process group, as many on all ranks; None:
        garbage-collected.
        """
        return [ref() for serial, ref in self.members.items() if serial >= self.first]


STATE = ProcessState()
_ELSEWHERE = (
    ("ds_core.comm.interceptor", "reset"),
    ("ds_core.comm.collectives", "reset"),
    ("ds_core.comm.start", "reset"),
    ("ds_core.accelerator", "reset_accelerator"),
    ("ds_core.plugins.discovery", "reset_discovery"),
)


def log_once(logger: logging.Logger, level: int, message: str, *arguments: Any) -> None:
    """Log `message` the first time it is said in this process."""
    if message not in STATE.told:
        STATE.told.add(message)
        logger.log(level, message, *arguments)


def show_log() -> None:
    """Give ds_core's log a handler and the level INFO, where the program has set up none."""
    if not log.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("[%(asctime)s] %(name)s: %(message)s", "%H:%M:%S"))
        log.addHandler(handler)
    if log.level == logging.NOTSET:
        log.setLevel(logging.INFO)


def reset() -> None:
    """Destroy live engines, and forget all other state of the process.

    That is the accelerator, interceptors and plugins.
    """
    for engine in STATE.engines:
        engine.destroy()
    STATE.told.clear()
    STATE.members.clear()
    for module, function in _ELSEWHERE:
        if module in sys.modules:  # what was never imported holds nothing
            getattr(sys.modules[module], function)()
