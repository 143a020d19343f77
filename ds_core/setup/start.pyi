from collections.abc import Callable, Iterable, Mapping
from os import PathLike
from typing import Any, Generic, NamedTuple, Protocol, TypeAlias, TypeVar, overload

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from ds_core.config.source import ConfigSource
from ds_core.engine import Engine, Loader

Config: TypeAlias = str | PathLike[str] | Mapping[str, Any] | ConfigSource

O_co = TypeVar("O_co", bound=Optimizer | None, covariant=True)
L_co = TypeVar("L_co", bound=Loader | None, covariant=True)

class TrainingLoader(Loader, Protocol):
    """What ``training_data`` becomes."""

    def __len__(self) -> int:
        """Batches per epoch on this rank; TypeError where that is unknown, as of a stream."""

    def set_epoch(self, epoch: int) -> None:
        """The next pass is that epoch."""

class Initialized(NamedTuple, Generic[O_co, L_co]):
    """What `initialize` returns. It can be unpacked into four; what does not apply is None."""

    engine: Engine
    optimizer: O_co
    training_dataloader: L_co
    lr_scheduler: Any

@overload
def initialize(
    args: Any = None,
    *,
    model: nn.Module,
    optimizer: Optimizer | Callable[[Any], Optimizer],
    model_parameters: Iterable[Any] | None = None,
    training_data: Dataset[Any],
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Config | None = None,
    mesh_param: tuple[int, int] | None = None,
    config_params: Config | None = None,
    plugins: Iterable[object] = (),
) -> Initialized[Optimizer, TrainingLoader]:
    """Make a model trainable as its config says. Collective: every rank calls it.

    Returns ``(engine, optimizer, training_dataloader, lr_scheduler)``; what does not apply is None.

    args: a namespace or a mapping, whose ``deepspeed_config`` may name the config file.
    model: any module; it is moved to the accelerator, and may ask for config sections (`compose`).
    optimizer: an Optimizer, or a function ``groups -> Optimizer``; overrides the config's.
    model_parameters: parameters or group dicts; default the model's trainable ones.
    training_data: a dataset; gives the dataloader.
    lr_scheduler: an object with ``step`` and state, or a function ``optimizer -> scheduler``.
    mpu: an external model-parallel unit.
    config: dict, file path or base64 text (config_params is its old name).
    mesh_param: (data, sequence) sizes; the second stands for the key sequence_parallel_size.
    plugins: modules, and objects whose methods are hooks, that take part in this run alone.

    Raises ConfigError (all problems at once), PluginError, RankMismatchError or UsageError.
    """

@overload
def initialize(
    args: Any = None,
    *,
    model: nn.Module,
    optimizer: None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Dataset[Any],
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Config | None = None,
    mesh_param: tuple[int, int] | None = None,
    config_params: Config | None = None,
    plugins: Iterable[object] = (),
) -> Initialized[Optimizer | None, TrainingLoader]: ...
@overload
def initialize(
    args: Any = None,
    *,
    model: nn.Module,
    optimizer: Optimizer | Callable[[Any], Optimizer],
    model_parameters: Iterable[Any] | None = None,
    training_data: None = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Config | None = None,
    mesh_param: tuple[int, int] | None = None,
    config_params: Config | None = None,
    plugins: Iterable[object] = (),
) -> Initialized[Optimizer, None]: ...
@overload
def initialize(
    args: Any = None,
    *,
    model: nn.Module,
    optimizer: None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: None = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Config | None = None,
    mesh_param: tuple[int, int] | None = None,
    config_params: Config | None = None,
    plugins: Iterable[object] = (),
) -> Initialized[Optimizer | None, None]: ...
@overload
def initialize(
    args: Any,
    model: nn.Module,
    /,
    optimizer: Optimizer | Callable[[Any], Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Config | None = None,
    mesh_param: tuple[int, int] | None = None,
    config_params: Config | None = None,
    plugins: Iterable[object] = (),
) -> Initialized[Optimizer | None, Loader | None]: ...
