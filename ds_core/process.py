"""What belongs to the process rather than to one engine; the only module-level state besides the plugin registry.

`reset` puts everything back, so that tests (and notebooks) can start afresh.
"""

from __future__ import annotations

import logging
import sys
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ds_core.engine import Engine

__all__ = ["STATE", "ProcessState", "reset", "tell_once"]


@dataclass
class ProcessState:
    """engines: those alive. made: how many there were. told: messages that need saying only once."""

    engines: weakref.WeakSet[Engine] = field(default_factory=weakref.WeakSet)
    made: int = 0
    told: set[str] = field(default_factory=set)

    def next_serial(self) -> int:
        """Numbers engines, so that all ranks can walk through them in one order."""
        self.made += 1
        return self.made


STATE = ProcessState()
_ELSEWHERE = (
    ("ds_core.comm.log", "reset"),
    ("ds_core.comm.guard", "reset"),
    ("ds_core.comm.start", "stop_lone"),
    ("ds_core.accelerator.select", "reset_accelerator"),
    ("ds_core.plugins", "reset_discovery"),
)


def tell_once(logger: logging.Logger, level: int, message: str, *arguments: Any) -> None:
    """Log `message` the first time it is said in this process."""
    if message not in STATE.told:
        STATE.told.add(message)
        logger.log(level, message, *arguments)


def reset() -> None:
    """Destroy live engines and forget the accelerator, the comms log and what plugins were discovered."""
    for engine in sorted(STATE.engines, key=lambda e: e.serial):
        engine.destroy()
    STATE.engines.clear()
    STATE.told.clear()
    for module, function in _ELSEWHERE:
        if module in sys.modules:  # what was never imported holds nothing
            getattr(sys.modules[module], function)()
