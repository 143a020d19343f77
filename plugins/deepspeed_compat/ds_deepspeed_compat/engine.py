"""``deepspeed.initialize`` and the classes of its engines.

The engine is ds_core's own, made by `ds_core.initialize`; its class is then one that is a ``torch.nn.Module`` too and
has DeepSpeed's names. Nothing of how it trains changes.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

import ds_core
from ds_core.engine import Engine
from ds_deepspeed_compat import engine_methods
from ds_deepspeed_compat.engine_getters import GETTERS

__all__ = [
    "DeepSpeedEngine",
    "DeepSpeedOptimizerCallable",
    "DeepSpeedSchedulerCallable",
    "PipelineEngine",
    "initialize",
]

DeepSpeedOptimizerCallable = Callable[[Any], Optimizer]
DeepSpeedSchedulerCallable = Callable[[Optimizer], Any]


class DeepSpeedEngine(Engine, nn.Module):  # type: ignore[misc]  # train and eval are the engine's
    """ds_core's engine under DeepSpeed's names, and a module whose one child is ``module``.

    So ``state_dict`` and ``named_parameters`` have names such as ``module.0.weight``, as with DeepSpeed.
    """

    loaded_checkpoint_tag: str | None = None
    loaded_checkpoint_dp_world_size: int | None = None
    loaded_checkpoint_mp_world_size: int | None = None
    pipeline_parallelism = False
    gradient_average = True

    __call__ = nn.Module.__call__  # runs the hooks that are registered on the engine
    __setattr__ = object.__setattr__  # type: ignore[assignment]  # modules and tensors are plain attributes

    @functools.wraps(Engine.load_checkpoint)
    def load_checkpoint(self, load_dir: str, tag: str | None = None, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """As ds_core's engine does; `loaded_checkpoint_tag` tells what was loaded."""
        path, client_state = super().load_checkpoint(load_dir, tag, *args, **kwargs)
        if path is not None:
            self.loaded_checkpoint_tag = tag or os.path.basename(os.path.normpath(path))
            self.loaded_checkpoint_dp_world_size = self.dp_world_size
            self.loaded_checkpoint_mp_world_size = self.mp_world_size
        return path, client_state

    # -- attributes of DeepSpeed's engine ----------------------------------------------------------------------

    @property
    def local_rank(self) -> int:
        """This process's number on its machine."""
        return ds_core.comm.local_rank()

    @property
    def dist_backend(self) -> str | None:
        """torch.distributed's backend."""
        return dist.get_backend() if dist.is_initialized() else None

    @property
    def dp_world_size(self) -> int:
        """Ranks that divide the batch."""
        return self.ctx.mesh.size("dp")

    seq_dp_world_size = dp_world_size

    @property
    def mp_world_size(self) -> int:
        """Ranks that divide the layers."""
        return self.ctx.mesh.size("tp") if self.ctx.mesh.has("tp") else 1

    @property
    def sequence_parallel_size(self) -> int:
        """Ranks that divide the sequence."""
        return self.ctx.mesh.size("sp") if self.ctx.mesh.has("sp") else 1

    @property
    def data_parallel_group(self) -> ProcessGroup:
        """The group of `dp_world_size`."""
        from ds_deepspeed_compat.groups import group_of

        return group_of(self.ctx.mesh, "dp")

    seq_data_parallel_group = data_parallel_group

    @property
    def mpu(self) -> Any:
        """The unit that initialize was given; None without one."""
        return getattr(self.ctx.mesh, "mpu", None)

    @property
    def basic_optimizer(self) -> Optimizer | None:
        """The optimizer."""
        return self.optimizer

    client_optimizer = basic_optimizer

    @property
    def client_lr_scheduler(self) -> Any:
        """The schedule."""
        return self.lr_scheduler

    @property
    def communication_data_type(self) -> Any:
        """The dtype in which gradients travel, by its name in the config; None: the model's."""
        return self.config.core.communication_data_type

    @property
    def collate_fn(self) -> Any:
        """What initialize was given."""
        return self.ctx.collate_fn

    @property
    def has_moe_layers(self) -> bool:
        """Whether a module of the model holds experts."""
        return bool(self.num_experts)

    @property
    def num_experts(self) -> list[int]:
        """The number of experts of each module that holds some."""
        layers: list[Any] = [m for m in self.module.modules() if hasattr(m, "num_experts") and hasattr(m, "ep_size")]
        return [layer.num_experts for layer in layers]

    @property
    def param_names(self) -> dict[nn.Parameter, str]:
        """The name of each parameter."""
        return {param: name for name, param in self.module.named_parameters()}

    @property
    def is_compiled(self) -> bool:
        """Whether `compile` has been called."""
        return self.module._compiled_call_impl is not None


for _name, _function in {**GETTERS, **{n: getattr(engine_methods, n) for n in engine_methods.__all__}}.items():
    setattr(DeepSpeedEngine, _name, _function)


class PipelineEngine(DeepSpeedEngine):
    """An engine whose model is a pipeline: it runs whole batches."""

    pipeline_parallelism = is_pipe_parallel = True

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline."""
        return self.ctx.mesh.size("pp")

    @property
    def stage_id(self) -> int:
        """This rank's stage."""
        return self.ctx.mesh.index("pp")

    @property
    def micro_batches(self) -> int:
        """Micro-batches per optimizer update."""
        return self.ctx.batch.gas

    @property
    def micro_batch_size(self) -> int:
        """Samples per micro-batch."""
        return self.ctx.batch.micro


@functools.wraps(ds_core.initialize)
def initialize(*args: Any, **kwargs: Any) -> tuple[DeepSpeedEngine, Any, Any, Any]:
    """`ds_core.initialize`, whose engine is a `DeepSpeedEngine`, or for a pipeline a `PipelineEngine`."""
    engine, optimizer, loader, scheduler = ds_core.initialize(*args, **kwargs)
    return _as_deepspeeds(engine), optimizer, loader, scheduler


def _as_deepspeeds(engine: Any) -> DeepSpeedEngine:
    """`engine`, of DeepSpeed's class from here on."""
    engine.__class__ = DeepSpeedEngine if engine.runner.manual else PipelineEngine
    nn.Module.__init__(engine)
    del engine.__dict__["training"]  # the module's counts
    engine._modules["module"] = engine.module
    return engine  # type: ignore[no-any-return]
