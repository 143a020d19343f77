"""Kits for testing ds_core and its plugins: conformance suites to subclass, and a pool of worker processes.

Everything is loaded on first use (PEP 562): pytest imports this package at start, when torch must stay out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ds_core.lazy import names_on_first_use

if TYPE_CHECKING:
    from ds_testing.accelerator import AcceleratorConformance
    from ds_testing.checkpointer import CheckpointerConformance
    from ds_testing.formats import ConfigFormatConformance
    from ds_testing.gradients import GradientsConformance
    from ds_testing.interceptor import InterceptorConformance
    from ds_testing.kernels import KernelConformance
    from ds_testing.loader import LoaderConformance
    from ds_testing.monitor import MonitorConformance
    from ds_testing.observer import ObserverConformance
    from ds_testing.plugin import PluginConformance
    from ds_testing.pool import RemoteError, WorkerPool, run_ranks
    from ds_testing.precision import PrecisionConformance
    from ds_testing.traffic import Traffic


__all__ = [
    "AcceleratorConformance",
    "CheckpointerConformance",
    "ConfigFormatConformance",
    "GradientsConformance",
    "InterceptorConformance",
    "KernelConformance",
    "LoaderConformance",
    "MonitorConformance",
    "ObserverConformance",
    "PluginConformance",
    "PrecisionConformance",
    "RemoteError",
    "Traffic",
    "WorkerPool",
    "run_ranks",
]

__getattr__, __dir__ = names_on_first_use(
    __name__,
    {
        "accelerator": "AcceleratorConformance",
        "checkpointer": "CheckpointerConformance",
        "formats": "ConfigFormatConformance",
        "gradients": "GradientsConformance",
        "interceptor": "InterceptorConformance",
        "kernels": "KernelConformance",
        "loader": "LoaderConformance",
        "monitor": "MonitorConformance",
        "observer": "ObserverConformance",
        "partitioner": "PartitionerConformance",
        "plugin": "PluginConformance",
        "precision": "PrecisionConformance",
        "pool": "RemoteError WorkerPool run_ranks",
        "runner": "RunnerConformance",
        "traffic": "Traffic",
    },
)
