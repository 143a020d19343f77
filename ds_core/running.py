"""A running engine as runners, telemetry, checkpoints and plugins see it: its parts, its counters and its getters.

Getters have DeepSpeed's names where it has them. The engine itself, in `ds_core.engine`, is what trains.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from ds_core.config import RunConfig
    from ds_core.context import Context
    from ds_core.data import Loader
    from ds_core.entries import Request
    from ds_core.partition import Partitioner
    from ds_core.precision import LossScaler
    from ds_core.runner import Runner
    from ds_core.telemetry import Telemetry

__all__ = ["RunningEngine"]


class RunningEngine(ABC):
    """module: the (transformed) model, its parameter names as they were. optimizer: the torch optimizer; under 16-bit
    modes it holds the fp32 master weights. scaler: the loss scaler, if any. serial: numbers the process's engines.
    should_stop: whether a plugin has asked all ranks to end training (`ds_request`), for the training loop to read.
    """

    ctx: Context
    config: RunConfig
    module: nn.Module
    partitioner: Partitioner
    runner: Runner
    optimizer: Optimizer | None
    lr_scheduler: Any
    scaler: LossScaler | None
    training_dataloader: Loader | None
    telemetry: Telemetry
    serial: int
    micro_steps = global_steps = global_samples = skipped_steps = 0
    should_stop = False
    _request: Request | None = None  # what plugins asked for in the step that is ending
    _norm: float | None = None
    _applied = False

    # -- what runners call -----------------------------------------------------------------------------------

    @abstractmethod
    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        """One forward."""

    @abstractmethod
    def backward_micro(self, loss: Tensor, *, last: bool) -> None:
        """Backward of one micro-batch's loss; gradients are reduced after the `last`."""

    @abstractmethod
    def run_backward(self, backward: Callable[[], object]) -> None:
        """Run `backward`, whose losses are multiplied by `loss_factor`; gradients are reduced as `sync` says."""

    @abstractmethod
    def check_loss(self, loss: Any) -> None:
        """Raise UsageError unless `loss` is a scalar tensor with a graph."""

    def loss_factor(self, count: int | None = None) -> float:
        """What a loss is multiplied by before its backward: the loss scale over `count`, which is gas by default."""
        return (self.scaler.scale if self.scaler is not None else 1.0) / (count or self.ctx.batch.gas)

    # -- what others call ------------------------------------------------------------------------------------

    @abstractmethod
    def drop_gradients(self) -> None:
        """Drop the gradients of the window."""

    @abstractmethod
    def begin_anew(self) -> None:
        """Forget the window, its gradients and the position in the data: all states have been replaced."""

    @abstractmethod
    def destroy(self) -> None:
        """Close monitors, remove hooks and free buffers."""

    # -- getters ---------------------------------------------------------------------------------------------

    def train_batch_size(self) -> int:
        """Samples per optimizer step over all ranks."""
        return self.ctx.batch.train

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples per rank per forward."""
        return self.ctx.batch.micro

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per optimizer step."""
        return self.ctx.batch.gas

    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's parameter groups; empty without an optimizer."""
        return self.optimizer.param_groups if self.optimizer is not None else []

    def get_lr(self) -> list[float]:
        """Learning rate of each parameter group."""
        return [float(g.get("lr", 0.0)) for g in self.param_groups()]

    def get_global_grad_norm(self) -> float | None:
        """L2 norm of all gradients, unscaled, before clipping, at the last update; None before the first."""
        return self._norm

    def was_step_applied(self) -> bool:
        """Whether the last `step` changed the weights."""
        return self._applied

    @property
    def loss_scale(self) -> float:
        """The current loss scale; 1 without a scaler."""
        return self.scaler.scale if self.scaler is not None else 1.0

    @property
    def device(self) -> torch.device:
        """Where the module's inputs should be."""
        return self.ctx.accelerator.current_device()

    @property
    def global_rank(self) -> int:
        """This process's rank."""
        return self.ctx.rank

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return self.ctx.world_size
