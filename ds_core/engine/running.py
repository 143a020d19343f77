"""A running engine as runners, telemetry, checkpoints and plugins see it: parts, counters, getters
and checkpoints.

The engine itself, in `ds_core.engine`, is what trains.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from ds_core.config import RunConfig
    from ds_core.context import Context
    from ds_core.engine import Checkpointer, Loader, MonitorMaster, Runner, Telemetry
    from ds_core.partition import Partitioner
    from ds_core.precision import LossScaler

log = logging.getLogger("ds_core.engine")

UNFINISHED = (
    "this checkpoint is saved in the middle of an accumulation window, whose gradients are not in "
    "it. A run that resumes from it begins the window again: the engine's own loader goes back to "
    "its first micro-batch, your own iterator has to; to save between windows, save when "
    "is_gradient_accumulation_boundary() was true before step()"
)


class RunningEngine(ABC):
    """The parts and counters of an engine."""

    # -- parts
    ctx: Context
    config: RunConfig
    module: nn.Module
    """The (transformed) model, its parameter names as they were."""
    partitioner: Partitioner
    runner: Runner
    optimizer: Optimizer | None
    """torch's optimizer; under 16-bit modes it has the fp32 master weights."""
    lr_scheduler: Any
    scaler: LossScaler | None
    """The loss scaler, if any."""
    training_dataloader: Loader | None
    telemetry: Telemetry
    monitor: MonitorMaster
    serial: int
    """Numbers the process's engines."""

    # -- counters
    micro_steps = global_steps = global_samples = skipped_steps = 0
    should_stop = False
    """Whether a plugin has asked all ranks to end training (`ds_request`), for the training loop to
    read."""

    # -- the last step
    _norm: float | None = None
    _applied = False

    # -- checkpoints
    _checkpointer: Checkpointer | None = None
    # Folder and tag of a checkpoint that observers were not informed of yet.
    _unannounced: tuple[str, str] | None = None

    # -- what runners call -------------------------------------------------------------------------

    @abstractmethod
    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        """One forward."""

    @abstractmethod
    def backward_micro(self, loss: Tensor, *, last: bool) -> None:
        """Backward of one micro-batch's loss; gradients are reduced after the `last`."""

    @abstractmethod
    def run_backward(self, backward: Callable[[], object], *, keep_local: bool = False) -> None:
        """Run `backward`, whose losses are multiplied by `loss_factor`; `reduce_gradients` ends the
        batch.

        keep_local: sharded gradients stay with this rank until then. Ranks may call it at
        different times, and differently often.
        """

    @abstractmethod
    def reduce_gradients(self) -> None:
        """Reduce the gradients of `run_backward`; without it the step does. Collective."""

    def loss_factor(self, count: int | None = None) -> float:
        """What a loss is multiplied by before its backward: the loss scale over `count`, which is
        gas by default.
        """
        return (self.scaler.scale if self.scaler is not None else 1.0) / (
            count or self.ctx.batch.gas
        )

    # -- what others call --------------------------------------------------------------------------

    @abstractmethod
    def drop_gradients(self) -> None:
        """Drop the gradients of the window."""

    @abstractmethod
    def begin_anew(self) -> None:
        """Forget the window, its gradients and the position in the data: all states have been
        replaced.
        """

    @abstractmethod
    def destroy(self) -> None:
        """Close monitors, remove hooks and free buffers."""

    # -- getters -----------------------------------------------------------------------------------

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
        """L2 norm of all gradients, unscaled, before clipping, at the last update; None before the
        first.
        """
        return self._norm

    def log(self, values: Mapping[str, float | Tensor], step: int | None = None) -> None:
        """Give your metrics to monitors: numbers or 0-d tensors by name, at `step`, by default
        `global_samples`.
        """
        at = self.global_samples if step is None else step
        self.monitor.write_events((name, value, at) for name, value in dict(values).items())

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

    # -- checkpoints -------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save all that a resumed run needs to ``save_dir/tag``. Every rank calls it.

        tag: default ``global_step{N}``.
        client_state: rank 0's values are kept, and given back by `load_checkpoint`.
        save_latest: a load without a tag takes this one.
        exclude_frozen_parameters: leave out weights that do not require gradients.

        UsageError where no checkpointer is installed; CheckpointError, on all ranks, when it fails.
        """
        from ds_core.engine.checkpointer import SaveOptions

        # Observers are informed of the last checkpoint, once it is durable, before the next begins.
        self._announce_saved()
        if self.partitioner.gradient_hooks.unfinished and self.ctx.rank == 0:
            log.warning(UNFINISHED)
        name = f"global_step{self.global_steps}" if tag is None else tag
        options = SaveOptions(name, client_state, save_latest, exclude_frozen_parameters)
        checkpointer = self._find()
        checkpointer.save(self, save_dir, options)
        if self.telemetry.observes("ds_checkpoint_saved"):
            self._unannounced = str(save_dir), name
            # Otherwise with the next save, or at the end: observers only see durable checkpoints.
            if not checkpointer.saving:
                self._announce_saved()
        return True

    def _announce_saved(self) -> None:
        """Tell observers of the last checkpoint, if they have not heard of it, once it is
        durable."""
        if (saved := self._unannounced) is not None:
            self._unannounced = None
            self._find().wait()
            self.telemetry.notify("ds_checkpoint_saved", folder=saved[0], tag=saved[1])

    def _find(self) -> Checkpointer:
        if self._checkpointer is None:
            needed = "no package that saves and loads checkpoints is installed"
            self._checkpointer = self.ctx.plugins.installed_driver(
                "ds_checkpointer", needed, ctx=self.ctx
            )
        return self._checkpointer

    def load_checkpoint(
        self,
        load_dir: str,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[[dict[str, Tensor], nn.Module], None] | None = None,
        missing_ok: bool = False,
        fallback: bool = False,
    ) -> tuple[str | None, Any]:
        """Read a checkpoint, saved at any world size; returns (path, client_state).

        Every rank calls it.

        Without a tag and without any checkpoint: (None, None) and a warning, or (None, {}) with
        missing_ok.
        fallback: when it is damaged, take the newest that is not. The rest:
            `ds_core.engine.checkpointer.LoadOptions`.
        """
        from ds_core.engine.checkpointer import LoadOptions

        options = LoadOptions(
            tag=tag,
            strict=load_module_strict,
            optimizer=load_optimizer_states,
            scheduler=load_lr_scheduler_states,
            module_only=load_module_only,
            custom=custom_load_fn,
            missing_ok=missing_ok,
            fallback=fallback,
        )
        self._announce_saved()
        path, client_state = self._find().load(self, load_dir, options)
        if path is not None:
            self.telemetry.notify("ds_checkpoint_loaded", path=path)
        return path, client_state

    def wait_for_checkpoint(self) -> None:
        """Return when the save under way, if any, is durable; raises what went wrong with it.

        Every rank calls it.
        """
        self._announce_saved()
        if self._checkpointer is not None:
            self._checkpointer.wait()

    def save_16bit_model(
        self,
        save_dir: str,
        save_filename: str = "model.safetensors",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write the whole model's 16-bit weights as one safetensors file on rank 0; whether it did.

        Collective.
        """
        export = self._find().export
        return export(self, save_dir, save_filename, exclude_frozen_parameters)

    def close_checkpointer(self) -> None:
        """Wait for a save under way, and release what it holds."""
        try:
            self._announce_saved()
        finally:
            if self._checkpointer is not None:
                self._checkpointer.close()
