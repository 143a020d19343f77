"""`Snapshot`: what each rank held in one step, written to a folder; for ``dscore plan
--against``."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ds_core.errors import UsageError
from ds_step_log.held import held_by_kind

if TYPE_CHECKING:
    from ds_core.context import Context
    from ds_step_log.config import MemorySnapshot
    from ds_step_log.memory import Used

log = logging.getLogger("ds_core.engine")


class Snapshot:
    """Takes one snapshot, and the allocator's history where the section asks for it.

    Raises UsageError where the device's allocator keeps no history.
    """

    def __init__(self, ctx: Context, section: MemorySnapshot) -> None:
        self._ctx = ctx
        self._section = section
        self._steps = 0
        self._kinds: dict[str, dict[str, int]] | None = None
        self._history = _history(ctx.accelerator.device_type) if section.history else None
        if self._history is not None:
            self._history._record_memory_history(max_entries=section.max_entries)

    def step_begin(self) -> None:
        """Between backward and update of the chosen step: look at what is held."""
        self._steps += 1
        if self._steps == self._section.step:
            self._kinds = held_by_kind(self._ctx.engine)

    def step_end(self, phases: Mapping[str, Used]) -> bool:
        """Write the files of the step that is over, if it is the chosen one; returns whether it
        was.
        """
        if self._kinds is None:
            return False
        ctx = self._ctx
        self._write(
            "",
            {
                "kinds": self._kinds,
                "phases": {phase: asdict(used) for phase, used in phases.items()},
            },
        )
        if ctx.rank == 0:
            log.info("memory of step %d written to %s", self._steps, self._section.folder)
        self.stop()
        return True

    def failed(self, error: BaseException) -> None:
        """Out of memory: keep what the allocator remembers."""
        # Other errors say nothing about memory.
        if isinstance(error, torch.OutOfMemoryError):
            self._write("-oom", {"error": str(error)})
            log.error(
                "out of memory: what rank %d held is in %s", self._ctx.rank, self._section.folder
            )
            self.stop()

    def stop(self) -> None:
        """The allocator need remember nothing more."""
        if self._history is not None:
            self._history._record_memory_history(enabled=None)
            self._history = None

    def _write(self, suffix: str, found: Mapping[str, Any]) -> None:
        ctx = self._ctx
        folder = Path(self._section.folder)
        folder.mkdir(parents=True, exist_ok=True)
        about: dict[str, Any] = {
            "version": 1,
            "rank": ctx.rank,
            "world": ctx.world_size,
            "dp": ctx.mesh.size("dp"),
        }
        about |= {"device": ctx.accelerator.device_type, "step": self._steps}
        about |= {"gas": ctx.batch.gas, "allocated": ctx.accelerator.memory_allocated()}
        name = f"rank{ctx.rank}{suffix}"
        (folder / f"{name}.json").write_text(
            json.dumps({**about, **found}, indent=1) + "\n", encoding="utf-8"
        )
        if self._history is not None:
            self._history._dump_snapshot(str(folder / f"{name}.pickle"))


def _history(device: str) -> Any:
    """The module of torch that keeps the history of `device`'s allocator."""
    memory = getattr(getattr(torch, device, None), "memory", None)
    if not (hasattr(memory, "_record_memory_history") and hasattr(memory, "_dump_snapshot")):
        raise UsageError(
            f"memory_snapshot.history: torch keeps no history of the memory of {device!r} (it does "
            "of CUDA's); "
            "without it a snapshot has bytes by kind and by phase"
        )
    return memory
