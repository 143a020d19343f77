"""Kits for testing ds_core and its plugins: conformance suites to subclass, and a pool of worker processes.

Everything is loaded on first use (PEP 562): pytest imports this package at start, when torch must stay out.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ds_core.testing.accelerator import AcceleratorConformance
    from ds_core.testing.kernels import KernelConformance
    from ds_core.testing.monitor import MonitorConformance
    from ds_core.testing.plugin import PluginConformance
    from ds_core.testing.pool import RemoteError, WorkerPool, run_ranks

_HOMES = {
    "AcceleratorConformance": "accelerator",
    "KernelConformance": "kernels",
    "MonitorConformance": "monitor",
    "PartitionerConformance": "partitioner",
    "PluginConformance": "plugin",
    "RemoteError": "pool",
    "RunnerConformance": "runner",
    "WorkerPool": "pool",
    "run_ranks": "pool",
}

__all__ = [
    "AcceleratorConformance",
    "KernelConformance",
    "MonitorConformance",
    "PluginConformance",
    "RemoteError",
    "WorkerPool",
    "run_ranks",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
