"""``deepspeed.initialize`` and the classes of its engines.

`DeepSpeedEngine` is a module around ds_core's engine, which does all the work: it has DeepSpeed's
names, and no state or behaviour of its own.
"""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import logging
import os
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

import ds_core
from ds_core.config.source import ConfigSource, read_config
from ds_core.engine import Engine
from ds_core.process import log_once
from ds_core.setup.assemble import config_source
from ds_deepspeed_compat.configs.release_config import as_released
from ds_deepspeed_compat.engines import engine_getters, engine_methods
from ds_deepspeed_compat.engines.engine_getters import read
from ds_deepspeed_compat.engines.optimizer import wrapped
from ds_deepspeed_compat.utils.timers import ThroughputTimer

log = logging.getLogger("ds_core")

DeepSpeedOptimizerCallable = Callable[[Any], Optimizer]
DeepSpeedSchedulerCallable = Callable[[Optimizer], Any]

_SETTABLE = {
    "lr_scheduler",
    "training_dataloader",
    "micro_steps",
    "global_steps",
    "global_samples",
    "skipped_steps",
}
"""Attributes that are set on ds_core's engine."""


class DeepSpeedEngine(nn.Module):
    """ds_core's engine under DeepSpeed's names, as a module whose one child is ``module``.

    So ``state_dict`` and ``named_parameters`` have names such as ``module.0.weight``, as with
    DeepSpeed. An attribute that is not its own is that of ds_core's engine, ``engine.core``, and
    then the model's.
    """

    core: Engine
    loaded_checkpoint_tag: str | None = None
    loaded_checkpoint_dp_world_size: int | None = None
    loaded_checkpoint_mp_world_size: int | None = None
    pipeline_parallelism = False
    gradient_average = True

    def __init__(self, core: Engine, groups: list[list[nn.Parameter]]) -> None:
        super().__init__()
        self.core = core
        self.module = core.module
        self.config = copy.deepcopy(core.config.raw)
        self.optimizer = wrapped(core, groups)
        self.training = core.module.training
        # Nothing waits for the device: a step costs what it costs without.
        self.tput_timer = ThroughputTimer(
            SimpleNamespace(synchronized=False), core.train_batch_size()
        )

    def __getattr__(self, name: str) -> Any:
        # `nn.Module.__getattr__` would end the search here; the core's engine and the model come
        # after it.
        if name in self.__dict__["_modules"]:
            return self._modules[name]
        if name == "core":
            raise AttributeError(name)
        return getattr(self.core, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # Set here they would hide the core's own, and the two would differ.
        if name in _SETTABLE:
            setattr(self.core, name, value)
        else:
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *self._modules, *dir(self.core)})

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the model."""
        if self.training:
            self.tput_timer.start()
        return self.core.forward(*inputs, **kwargs)

    @functools.wraps(Engine.step)
    def step(self, *args: Any, **kwargs: Any) -> None:
        """As ds_core's engine does; `tput_timer` has the time since the forward."""
        # A micro-batch inside an accumulation window is no step of the timer's.
        before = self.core.global_steps
        self.core.step(*args, **kwargs)
        self.tput_timer.stop(global_step=self.core.global_steps != before)

    @functools.wraps(Engine.train_batch)
    def train_batch(self, *args: Any, **kwargs: Any) -> Any:
        """As ds_core's engine does; `tput_timer` has the time of the whole batch."""
        self.tput_timer.start()
        loss = self.core.train_batch(*args, **kwargs)
        self.tput_timer.stop(global_step=True)
        return loss

    @property
    def random_ltd_scheduler(self) -> Any:
        """How many tokens layers keep; None where none are dropped."""
        scheduler: Any = getattr(self.core, "random_ltd_schedule", None)
        return None if scheduler is None else scheduler()

    def backward(
        self,
        loss: Tensor,
        retain_graph: bool = False,
        scale_wrt_gas: bool = True,
        *,
        allreduce_gradients: bool = True,
        release_loss: bool = False,
    ) -> Tensor:
        """As ds_core's engine does, with arguments in the order of DeepSpeed's release."""
        return self.core.backward(
            loss,
            allreduce_gradients,
            release_loss,
            retain_graph=retain_graph,
            scale_wrt_gas=scale_wrt_gas,
        )

    @functools.wraps(Engine.load_checkpoint)
    def load_checkpoint(
        self, load_dir: str, tag: str | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """As ds_core's engine does; `loaded_checkpoint_tag` tells what was loaded."""
        path, client_state = self.core.load_checkpoint(load_dir, tag, *args, **kwargs)
        if path is not None:
            self.loaded_checkpoint_tag = tag or os.path.basename(os.path.normpath(path))
            self.loaded_checkpoint_dp_world_size = self.dp_world_size
            self.loaded_checkpoint_mp_world_size = self.mp_world_size
        return path, client_state

    def loss_scale(self) -> float:
        """``fp16.loss_scale`` of the config, 0 for a dynamic one; the scale now is
        ``optimizer.loss_scale``.
        """
        return float(read(self.core, "fp16.loss_scale", 0))

    @functools.cached_property
    def _config(self) -> Any:
        """The config as one flat `DeepSpeedConfig`; setting its attributes changes no run."""
        from ds_deepspeed_compat.configs.deepspeed_config import DeepSpeedConfig

        return DeepSpeedConfig(self.core.config.raw, self.mpu)

    # -- attributes of DeepSpeed's engine ----------------------------------------------------------

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
        return self.core.ctx.mesh.size("batch")

    @property
    def seq_dp_world_size(self) -> int:
        """Ranks over which gradients are averaged: those that divide the batch, and its
        sequences."""
        return self.core.ctx.mesh.size("dp")

    @property
    def mp_world_size(self) -> int:
        """Ranks that divide the layers."""
        return self._size("tp")

    @property
    def sequence_parallel_size(self) -> int:
        """Ranks that divide the sequence."""
        return self._size("sp")

    def _size(self, axis: str) -> int:
        mesh = self.core.ctx.mesh
        return mesh.size(axis) if mesh.has(axis) else 1

    @property
    def data_parallel_group(self) -> ProcessGroup:
        """The group of `dp_world_size`."""
        from ds_deepspeed_compat.utils.groups import group_of

        return group_of(self.core.ctx.mesh, "batch")

    @property
    def seq_data_parallel_group(self) -> ProcessGroup:
        """The group of `seq_dp_world_size`."""
        from ds_deepspeed_compat.utils.groups import group_of

        return group_of(self.core.ctx.mesh, "dp")

    @property
    def mpu(self) -> Any:
        """The unit that initialize was given; None without one."""
        return getattr(self.core.ctx.mesh, "mpu", None)

    @property
    def basic_optimizer(self) -> Optimizer | None:
        """torch's optimizer."""
        return self.core.optimizer

    client_optimizer = basic_optimizer

    @property
    def client_lr_scheduler(self) -> Any:
        """The schedule."""
        return self.core.lr_scheduler

    @property
    def communication_data_type(self) -> Any:
        """The dtype in which gradients travel, by its name in the config; None: the model's."""
        return self.core.config.core.communication_data_type

    @property
    def collate_fn(self) -> Any:
        """What initialize was given."""
        return self.core.ctx.collate_fn

    @property
    def has_moe_layers(self) -> bool:
        """Whether a module of the model holds experts."""
        return bool(self.num_experts)

    @property
    def num_experts(self) -> list[int]:
        """The number of experts of each module that holds some."""
        layers: list[Any] = [
            m for m in self.module.modules() if hasattr(m, "num_experts") and hasattr(m, "ep_size")
        ]
        return [layer.num_experts for layer in layers]

    @property
    def param_names(self) -> dict[nn.Parameter, str]:
        """The name of each parameter."""
        return {param: name for name, param in self.module.named_parameters()}

    @property
    def is_compiled(self) -> bool:
        """Whether `compile` has been called."""
        return any(module._compiled_call_impl is not None for module in self.module.modules())

    def compile(
        self,
        backend: str | Callable[..., Any] = "inductor",
        compile_kwargs: dict[str, Any] | None = None,
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """Compile the model with torch.compile, in place."""
        self.core.compile(backend, compile_kwargs, schedule, compiled_autograd_enabled)


def _of_core(function: Callable[..., Any]) -> Callable[..., Any]:
    """A method that calls `function` with ds_core's engine."""

    @functools.wraps(function)
    def method(self: DeepSpeedEngine, *args: Any, **kwargs: Any) -> Any:
        return function(self.core, *args, **kwargs)

    return method


_GIVEN = {
    **{name: getattr(engine_getters, name) for name in engine_getters.CONFIG_KEYS},
    **{name: getattr(engine_methods, name) for name in engine_methods.__all__},
}
# a module's own train and eval do as well
_OWN = {*vars(DeepSpeedEngine), "train", "eval", "param_groups"}
for _name, _function in {**dict(inspect.getmembers(Engine, inspect.isfunction)), **_GIVEN}.items():
    if _name not in _OWN and (not _name.startswith("_") or _name in _GIVEN):
        setattr(DeepSpeedEngine, _name, _of_core(_function))


class PipelineEngine(DeepSpeedEngine):
    """An engine whose model is a pipeline: it runs whole batches."""

    pipeline_parallelism = is_pipe_parallel = True

    @property
    def grid(self) -> Any:
        """Where this rank stands, and its groups: a `PipelineParallelGrid`."""
        module: Any = self.module
        return module.mpu()

    mpu = grid

    @property
    def is_data_parallel(self) -> bool:
        """Whether several ranks have this stage's layers."""
        return self.dp_world_size > 1

    @property
    def is_model_parallel(self) -> bool:
        """Whether ranks divide the layers."""
        return self.mp_world_size > 1

    @property
    def prev_stage(self) -> int:
        """The stage before this one; -1 at the first."""
        return self.stage_id - 1

    @property
    def next_stage(self) -> int:
        """The stage after this one, also at the last."""
        return self.stage_id + 1

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline."""
        return self.core.ctx.mesh.size("pp")

    @property
    def stage_id(self) -> int:
        """This rank's stage."""
        return self.core.ctx.mesh.index("pp")

    @property
    def micro_batches(self) -> int:
        """Micro-batches per optimizer update."""
        return self.core.ctx.batch.gas

    @property
    def micro_batch_size(self) -> int:
        """Samples per micro-batch."""
        return self.core.ctx.batch.micro


@functools.wraps(ds_core.initialize)
def initialize(*args: Any, **kwargs: Any) -> tuple[DeepSpeedEngine, Any, Any, Any]:
    """`ds_core.initialize`, whose engine is in a `DeepSpeedEngine`, or for a pipeline in a
    `PipelineEngine`.
    """
    # By name, whatever way the arguments came: some of them are replaced.
    given = inspect.signature(ds_core.initialize).bind(*args, **kwargs).arguments
    rows = given.get("model_parameters")
    if isinstance(rows, Iterable):  # generators are read once, and twice here
        rows = given["model_parameters"] = [_listed(row) for row in rows]
    # The release's reading of the config, before ds_core checks it more strictly.
    _read_config(given)
    _uncompressed(given)
    # Taken before ds_core divides or replaces parameters.
    groups = _groups(given.get("model"), given.get("optimizer"), rows)
    core, _, loader, scheduler = ds_core.initialize(**given)
    engine = (DeepSpeedEngine if core.runner.manual else PipelineEngine)(core, groups)
    return engine, engine.optimizer, loader, scheduler


def _read_config(given: dict[str, Any]) -> None:
    """Replace the config among `given`, wherever it was given, by what DeepSpeed's release makes of
    it.
    """
    args = given.get("args")
    source = read_config(config_source(args, given.get("config"), given.pop("config_params", None)))
    given["config"] = as_released(source)
    if args is not None:  # it names the config no more
        names = args if isinstance(args, dict) else vars(args)
        given["args"] = {
            k: v for k, v in names.items() if k not in ("deepspeed_config", "deepscale_config")
        }


def _uncompressed(given: dict[str, Any]) -> None:
    """Leave ``compression_training`` out of the config of a model that `init_compression` never
    had.

    The release compresses no other: a teacher that is given the config of its student stays as it
    is.
    """
    source = given["config"]
    if "compression_training" not in source.raw or find_spec("ds_compression") is None:
        return
    names = importlib.import_module("ds_compression.deepspeed_names")
    if given.get("model") is None or names.is_prepared(given["model"]):
        return
    rest = {key: value for key, value in source.raw.items() if key != "compression_training"}
    given["config"] = ConfigSource(rest, source.origin)
    text = (
        "config: compression_training has no effect on this model, which init_compression was "
        "not "
        "given"
    )
    log_once(log, logging.INFO, text)


def _listed(row: Any) -> Any:
    """A parameter, or a group whose parameters are a list."""
    if not isinstance(row, dict) or not isinstance(params := row.get("params"), Iterable):
        return row
    return {**row, "params": [params] if isinstance(params, nn.Parameter) else list(params)}


def _groups(model: Any, optimizer: Any, rows: list[Any] | None) -> list[list[nn.Parameter]]:
    """The parameters that initialize is given to train, group by group."""
    if isinstance(optimizer, Optimizer):
        rows = optimizer.param_groups
    if rows and isinstance(rows[0], dict):
        return [list(row["params"]) for row in rows]
    if rows is None and isinstance(model, nn.Module):
        rows = [p for p in model.parameters() if p.requires_grad]
    return [list(rows or [])]
