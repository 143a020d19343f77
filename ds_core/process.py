"""State of the process rather than of one engine. `reset` clears it, so that tests and notebooks start afresh."""

from __future__ import annotations

import logging
import sys
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ds_core.running import RunningEngine

log = logging.getLogger("ds_core")

__all__ = ["STATE", "ProcessState", "reset", "show_log", "tell_once"]


@dataclass
class ProcessState:
    """engines: those alive. told: messages that are logged only once."""

    engines: weakref.WeakSet[RunningEngine] = field(default_factory=weakref.WeakSet)
    told: set[str] = field(default_factory=set)


STATE = ProcessState()
_ELSEWHERE = (
    ("ds_core.multi_engine", "reset"),
    ("ds_core.comm.interceptor", "reset"),
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


def show_log() -> None:
    """Give ds_core's log a handler and the level INFO, where the program has set up none."""
    if not log.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("[%(asctime)s] %(name)s: %(message)s", "%H:%M:%S"))
        log.addHandler(handler)
    if log.level == logging.NOTSET:
        log.setLevel(logging.INFO)


def reset() -> None:
    """Destroy live engines, and forget all other state of the process: accelerator, interceptors, plugins."""
    for engine in sorted(STATE.engines, key=lambda e: e.serial):
        engine.destroy()
    STATE.engines.clear()
    STATE.told.clear()
    for module, function in _ELSEWHERE:
        if module in sys.modules:  # what was never imported holds nothing
            getattr(sys.modules[module], function)()
