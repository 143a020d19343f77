"""What this distribution offers to ds_core: the section ``tensorboard`` and its monitor
(torch-free).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import BaseModel

    from ds_core.config import RunConfig
    from ds_core.context import Context
    from ds_core.errors import Problem
    from ds_core.telemetry import Monitor
    from ds_monitor_tensorboard.config import TensorBoardConfig


def ds_config() -> type[BaseModel]:
    """The section ``tensorboard``."""
    from ds_monitor_tensorboard.config import TensorBoardConfig

    return TensorBoardConfig


def ds_check(config: RunConfig) -> Iterable[Problem]:
    """That the package is there when the section is enabled."""
    from ds_monitor_kit import check_package

    return check_package(config, "tensorboard", "tensorboard", "tensorboard")


def ds_monitors(ctx: Context) -> Iterable[Monitor]:
    """One monitor when ``tensorboard.enabled``, else none. Touches no file before the first flush.

    Raises PluginError when the package tensorboard cannot be imported.
    """
    from ds_monitor_kit import service_monitors

    def make(section: TensorBoardConfig) -> Monitor:
        from ds_monitor_tensorboard.monitor import TensorBoardMonitor

        return TensorBoardMonitor(section.directory())

    return service_monitors(ctx, "tensorboard", "tensorboard", "tensorboard", make)
