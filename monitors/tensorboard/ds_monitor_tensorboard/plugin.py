"""What this distribution offers to ds_core: the section ``tensorboard`` and its monitor (torch-free)."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ds_core.errors import PluginError, Problem

if TYPE_CHECKING:
    from pydantic import BaseModel

    from ds_core.config import RunConfig
    from ds_core.context import Context
    from ds_core.telemetry import Monitor

__all__ = ["ds_check", "ds_config", "ds_monitors"]


def ds_config() -> type[BaseModel]:
    """The section ``tensorboard``."""
    from ds_monitor_tensorboard.config import TensorBoardConfig

    return TensorBoardConfig


def ds_check(config: RunConfig) -> Iterable[Problem]:
    """That the package is there when the section is enabled; asked on every rank, so that all stop together."""
    if getattr(config.section("tensorboard"), "enabled", False):
        spec = importlib.util.find_spec("tensorboard")
        if spec is None or spec.origin is None:  # no origin: a folder of that name, such as one for logs
            yield Problem("tensorboard.enabled", "the package tensorboard is not installed", "pip install tensorboard")


def ds_monitors(ctx: Context) -> Iterable[Monitor]:
    """One monitor when ``tensorboard.enabled``, else none. Touches no file before the first flush.

    Raises PluginError when the package tensorboard cannot be imported.
    """
    from ds_monitor_tensorboard.config import TensorBoardConfig

    section = ctx.config.section("tensorboard")
    if not isinstance(section, TensorBoardConfig) or not section.enabled:
        return []
    try:
        from ds_monitor_tensorboard.monitor import TensorBoardMonitor
    except ImportError as error:
        raise PluginError(
            f"the section tensorboard is enabled, but the package tensorboard cannot be imported ({error}); "
            "pip install tensorboard, or set tensorboard.enabled to false"
        ) from error
    from ds_monitor_kit import Background

    return [Background(TensorBoardMonitor(section.directory()))]
