"""What this distribution offers to ds_core: the section ``mlflow`` and its monitor (torch-free)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import BaseModel

    from ds_core.config import RunConfig
    from ds_core.context import Context
    from ds_core.errors import Problem
    from ds_core.telemetry import Monitor
    from ds_monitor_mlflow.config import MLflowConfig


def ds_config() -> type[BaseModel]:
    """The section ``mlflow``."""
    from ds_monitor_mlflow.config import MLflowConfig

    return MLflowConfig


def ds_check(config: RunConfig) -> Iterable[Problem]:
    """That the package is there when the section is enabled."""
    from ds_monitor_kit import check_package

    return check_package(config, "mlflow", "mlflow", "mlflow-skinny")


def ds_monitors(ctx: Context) -> Iterable[Monitor]:
    """One monitor when ``mlflow.enabled``, else none.

    Raises PluginError when the package cannot be imported.
    """
    from ds_monitor_kit import service_monitors

    def make(section: MLflowConfig) -> Monitor:
        from ds_monitor_mlflow.monitor import MLflowMonitor

        return MLflowMonitor(section, ctx.config.redacted())

    return service_monitors(ctx, "mlflow", "mlflow", "mlflow-skinny", make)
