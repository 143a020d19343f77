"""``deepspeed.monitor.monitor``: monitors made from their sections of the config alone, without an
engine.
"""

from __future__ import annotations

import weakref
from typing import Any

from ds_core import comm
from ds_core.accelerator import get_accelerator
from ds_core.context import Context
from ds_core.engine import Monitor
from ds_core.engine import MonitorMaster as Monitors
from ds_core.errors import UsageError
from ds_core.kernels import Kernels
from ds_core.mesh import plan_mesh
from ds_core.precision import make_precision
from ds_core.setup.compose import compose


class _OfSection(Monitors):
    """The monitor of one section; only rank 0 makes it.

    It is closed at the end of the program, or by `close`.

    config: the section, as `get_monitor_config` gives it.
    """

    section = ""

    def __init__(self, config: Any) -> None:
        super().__init__()
        if not hasattr(config, "model_dump") or not hasattr(config, "enabled"):
            raise UsageError(
                f"{type(self).__name__} takes the section {self.section!r}, as "
                "get_monitor_config(config) gives it, "
                f"not {config!r}"
            )
        self._asked = bool(config.enabled)
        if self._asked and comm.rank() == 0:
            self.monitors.extend(_monitors({self.section: config.model_dump(exclude_unset=True)}))
        weakref.finalize(self, _close, self.monitors)

    @property
    def enabled(self) -> bool:
        """Whether the section is switched on; the same on every rank."""
        return self._asked


class TensorBoardMonitor(_OfSection):
    """That of the section ``tensorboard``."""

    section = "tensorboard"


class WandbMonitor(_OfSection):
    """That of the section ``wandb``."""

    section = "wandb"


class csvMonitor(_OfSection):
    """That of the section ``csv_monitor``."""

    section = "csv_monitor"


class CometMonitor(_OfSection):
    """That of the section ``comet``."""

    section = "comet"


_KINDS: dict[str, type[_OfSection]] = {
    "tb_monitor": TensorBoardMonitor,
    "wandb_monitor": WandbMonitor,
    "csv_monitor": csvMonitor,
    "comet_monitor": CometMonitor,
}
"""DeepSpeed's attributes of a `MonitorMaster`."""


class MonitorMaster(Monitors):
    """Gives events to the monitors that `monitor_config` switches on.

    monitor_config: the sections, as `get_monitor_config` gives them. Attributes of monitors that
    are off are None.
    """

    tb_monitor: TensorBoardMonitor | None = None
    wandb_monitor: WandbMonitor | None = None
    csv_monitor: csvMonitor | None = None
    comet_monitor: CometMonitor | None = None

    def __init__(self, monitor_config: Any) -> None:
        super().__init__()
        for attribute, kind in _KINDS.items():
            if not hasattr(monitor_config, kind.section):
                raise UsageError(
                    "MonitorMaster takes the sections of monitors, as get_monitor_config(config) "
                    "gives them, and "
                    f"{monitor_config!r} has no {kind.section}"
                )
            section = getattr(monitor_config, kind.section)
            if section.enabled:
                setattr(self, attribute, made := kind(section))
                self.monitors.extend(made.monitors)

    @property
    def enabled(self) -> bool:
        """Whether one of them is on; the same on every rank."""
        return any(getattr(self, attribute) is not None for attribute in _KINDS)


def _monitors(sections: dict[str, Any]) -> list[Monitor]:
    """What plugins make of these sections, in a run of one process."""
    chosen = compose({"train_batch_size": 1, **sections})
    mesh = plan_mesh([], 1, 0)
    kernels = Kernels(chosen.plugins, {})
    precision = make_precision(chosen.config, chosen.plugins)
    ctx = Context(
        chosen.config,
        chosen.plugins,
        mesh,
        get_accelerator(chosen.plugins),
        kernels,
        precision,
        chosen.batch(1),
    )
    return [
        monitor for answer in chosen.plugins.ask("ds_monitors", ctx=ctx) for monitor in answer.value
    ]


def _close(monitors: list[Monitor]) -> None:
    """At the end: a monitor that is still there has events to write."""
    for monitor in monitors:
        monitor.close()
