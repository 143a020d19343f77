"""Kits for testing ds_core and its plugins: conformance suites to subclass, and a pool of worker
processes.

Everything is loaded on first use (PEP 562): pytest imports this package at start, when torch must
stay out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ds_core import names_on_first_use

if TYPE_CHECKING:
    from ds_testing.accelerator import AcceleratorConformance
    from ds_testing.checkpointer import CheckpointerConformance
    from ds_testing.collectives import CollectivesConformance
    from ds_testing.command import CommandConformance
    from ds_testing.compile_pass import CompilePassConformance
    from ds_testing.config_hooks import ChartConformance, CheckConformance
    from ds_testing.engine_methods import EngineMethodsConformance
    from ds_testing.formats import ConfigFormatConformance
    from ds_testing.gradients import GradientsConformance
    from ds_testing.interceptor import InterceptorConformance
    from ds_testing.kernels import KernelConformance
    from ds_testing.launcher import LauncherConformance
    from ds_testing.loader import LoaderConformance
    from ds_testing.memory import MemoryConformance
    from ds_testing.mesh import MeshAxisConformance, MeshConformance
    from ds_testing.monitor import MonitorConformance
    from ds_testing.observer import ObserverConformance
    from ds_testing.optimizer import OptimizerConformance
    from ds_testing.partitioner import PartitionerConformance
    from ds_testing.plugin import PluginConformance
    from ds_testing.pool import RemoteError, WorkerPool, run_ranks
    from ds_testing.precision import PrecisionConformance
    from ds_testing.rendezvous import RendezvousConformance
    from ds_testing.runner import RunnerConformance
    from ds_testing.scheduler import SchedulerConformance
    from ds_testing.sharding import ShardedTransformConformance
    from ds_testing.store import StateStoreConformance
    from ds_testing.traffic import Traffic
    from ds_testing.transform import TransformConformance


__all__ = [
    "AcceleratorConformance",
    "ChartConformance",
    "CheckConformance",
    "CheckpointerConformance",
    "CollectivesConformance",
    "CommandConformance",
    "CompilePassConformance",
    "ConfigFormatConformance",
    "EngineMethodsConformance",
    "GradientsConformance",
    "InterceptorConformance",
    "KernelConformance",
    "LauncherConformance",
    "LoaderConformance",
    "MemoryConformance",
    "MeshAxisConformance",
    "MeshConformance",
    "MonitorConformance",
    "ObserverConformance",
    "OptimizerConformance",
    "PartitionerConformance",
    "PluginConformance",
    "PrecisionConformance",
    "RemoteError",
    "RendezvousConformance",
    "RunnerConformance",
    "SchedulerConformance",
    "ShardedTransformConformance",
    "StateStoreConformance",
    "Traffic",
    "TransformConformance",
    "WorkerPool",
    "run_ranks",
]

__getattr__, __dir__ = names_on_first_use(
    __name__,
    {
        "accelerator": "AcceleratorConformance",
        "checkpointer": "CheckpointerConformance",
        "collectives": "CollectivesConformance",
        "command": "CommandConformance",
        "compile_pass": "CompilePassConformance",
        "config_hooks": "ChartConformance CheckConformance",
        "engine_methods": "EngineMethodsConformance",
        "formats": "ConfigFormatConformance",
        "gradients": "GradientsConformance",
        "interceptor": "InterceptorConformance",
        "kernels": "KernelConformance",
        "launcher": "LauncherConformance",
        "loader": "LoaderConformance",
        "memory": "MemoryConformance",
        "mesh": "MeshAxisConformance MeshConformance",
        "monitor": "MonitorConformance",
        "observer": "ObserverConformance",
        "optimizer": "OptimizerConformance",
        "partitioner": "PartitionerConformance",
        "plugin": "PluginConformance",
        "pool": "RemoteError WorkerPool run_ranks",
        "precision": "PrecisionConformance",
        "rendezvous": "RendezvousConformance",
        "runner": "RunnerConformance",
        "scheduler": "SchedulerConformance",
        "sharding": "ShardedTransformConformance",
        "store": "StateStoreConformance",
        "traffic": "Traffic",
        "transform": "TransformConformance",
    },
)
