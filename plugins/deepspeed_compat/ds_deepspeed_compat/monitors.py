"""``deepspeed.monitor.monitor``: monitors made from their sections of the config alone, without an engine."""

from __future__ import annotations

import weakref
from typing import Any

from ds_core import comm
from ds_core.accelerator import get_accelerator
from ds_core.compose import compose
from ds_core.context import Context
from ds_core.errors import UsageError
from ds_core.kernels import Kernels
from ds_core.mesh import plan_mesh
from ds_core.precision import make_precision
from ds_core.telemetry import Monitor
from ds_core.telemetry import MonitorMaster as Monitors

__all__ = ["MonitorMaster"]

_SECTIONS = {
    "tensorboard": "tb_monitor",
    "wandb": "wandb_monitor",
    "csv_monitor": "csv_monitor",
    "comet": "comet_monitor",
}
"""The section of each of DeepSpeed's monitors, and the attribute of `MonitorMaster` that has it."""


class MonitorMaster(Monitors):
    """Gives events to the monitors that `monitor_config` switches on; only rank 0 makes them.

    monitor_config: a `DeepSpeedMonitorConfig`, as `get_monitor_config` gives it. They are closed at the end of the
    program, or by `close`.
    """

    tb_monitor: Monitor | None = None
    wandb_monitor: Monitor | None = None
    csv_monitor: Monitor | None = None
    comet_monitor: Monitor | None = None

    def __init__(self, monitor_config: Any) -> None:
        if absent := [name for name in _SECTIONS if not hasattr(monitor_config, name)]:
            raise UsageError(
                f"MonitorMaster takes the sections of monitors (get_monitor_config(config)), and {monitor_config!r} "
                f"has no {absent[0]}"
            )
        super().__init__()
        sections = {name: getattr(monitor_config, name) for name in _SECTIONS}
        self._asked = [name for name, section in sections.items() if section.enabled]
        if self._asked and comm.rank() == 0:
            made = _monitors({name: sections[name].model_dump(exclude_unset=True) for name in self._asked})
            self.monitors.extend(made)
            for monitor in made:
                setattr(self, _SECTIONS[monitor.name], monitor)
        weakref.finalize(self, _close, self.monitors)

    @property
    def enabled(self) -> bool:
        """Whether a monitor is switched on, on every rank."""
        return bool(self._asked)


def _monitors(sections: dict[str, Any]) -> list[Monitor]:
    """What plugins make of these sections, in a run of one process."""
    chosen = compose({"train_batch_size": 1, **sections})
    mesh = plan_mesh([], 1, 0)
    kernels = Kernels(chosen.plugins, {})
    precision = make_precision(chosen.config, chosen.plugins)
    ctx = Context(
        chosen.config, chosen.plugins, mesh, get_accelerator(chosen.plugins), kernels, precision, chosen.batch(1)
    )
    return [monitor for answer in chosen.plugins.ask("ds_monitors", ctx=ctx) for monitor in answer.value]


def _close(monitors: list[Monitor]) -> None:
    """At the end: a monitor that is still there has events to write."""
    for monitor in monitors:
        monitor.close()
