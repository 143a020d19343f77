from ds_testing.kits.devices.accelerator import AcceleratorConformance as AcceleratorConformance
from ds_testing.kits.devices.compile_pass import CompilePassConformance as CompilePassConformance
from ds_testing.kits.devices.kernels import KernelConformance as KernelConformance
from ds_testing.kits.devices.memory import MemoryConformance as MemoryConformance
from ds_testing.kits.devices.store import StateStoreConformance as StateStoreConformance
from ds_testing.kits.matrix.values import CombinationConformance as CombinationConformance
from ds_testing.kits.parallel.collectives import CollectivesConformance as CollectivesConformance
from ds_testing.kits.parallel.interceptor import InterceptorConformance as InterceptorConformance
from ds_testing.kits.parallel.mesh import MeshAxisConformance as MeshAxisConformance
from ds_testing.kits.parallel.mesh import MeshConformance as MeshConformance
from ds_testing.kits.parallel.runner import RunnerConformance as RunnerConformance
from ds_testing.kits.parallel.sharding import (
    ShardedTransformConformance as ShardedTransformConformance,
)
from ds_testing.kits.tools.command import CommandConformance as CommandConformance
from ds_testing.kits.tools.config_hooks import ChartConformance as ChartConformance
from ds_testing.kits.tools.config_hooks import CheckConformance as CheckConformance
from ds_testing.kits.tools.engine_methods import (
    EngineMethodsConformance as EngineMethodsConformance,
)
from ds_testing.kits.tools.formats import ConfigFormatConformance as ConfigFormatConformance
from ds_testing.kits.tools.launcher import LauncherConformance as LauncherConformance
from ds_testing.kits.tools.monitor import MonitorConformance as MonitorConformance
from ds_testing.kits.tools.monitor import ServicePluginConformance as ServicePluginConformance
from ds_testing.kits.tools.plugin import PluginConformance as PluginConformance
from ds_testing.kits.tools.rendezvous import RendezvousConformance as RendezvousConformance
from ds_testing.kits.train.checkpointer import CheckpointerConformance as CheckpointerConformance
from ds_testing.kits.train.gradients import GradientsConformance as GradientsConformance
from ds_testing.kits.train.loader import LoaderConformance as LoaderConformance
from ds_testing.kits.train.observer import ObserverConformance as ObserverConformance
from ds_testing.kits.train.optimizer import OptimizerConformance as OptimizerConformance
from ds_testing.kits.train.partitioner import PartitionerConformance as PartitionerConformance
from ds_testing.kits.train.precision import PrecisionConformance as PrecisionConformance
from ds_testing.kits.train.scheduler import SchedulerConformance as SchedulerConformance
from ds_testing.kits.train.transform import TransformConformance as TransformConformance
from ds_testing.pool import RemoteError as RemoteError
from ds_testing.pool import WorkerPool as WorkerPool
from ds_testing.pool import run_ranks as run_ranks
from ds_testing.traffic import Traffic as Traffic
