"""The engine: forward, backward, step. It knows no feature; a partitioner, a runner and hooks do the work.

One step: gradients are final (`Partitioner.finish`) -> norm, the same on all ranks -> not finite: skip -> unscale and
clip in one pass -> optimizer -> publish -> schedule -> observers and monitors.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ds_core import checkpoint, comm, joint
from ds_core.absent import no_attribute
from ds_core.config.batch import Batch, with_micro_batch_size, with_train_batch_size
from ds_core.data import DistributedLoader
from ds_core.ended import end
from ds_core.errors import UsageError
from ds_core.params import GradNorm
from ds_core.precision import LossScaler, autocast_context, cast_floats
from ds_core.process import STATE, Taken
from ds_core.report import Reporter
from ds_core.runstate import load_run_state, run_state
from ds_core.window import Window
from ds_core.zerograd import unwatch_zero_grad, watch_zero_grad

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from ds_core.context import Context
    from ds_core.partition import Partitioner
    from ds_core.runner import Runner

__all__ = ["Engine", "required"]

log = logging.getLogger("ds_core.engine")


class Engine:
    """A model being trained. Made by `ds_core.initialize`; unknown attributes are the partitioner's `methods`, then
    the module's.

    module: the (transformed) model, its parameter names as they were. optimizer: the torch optimizer; under 16-bit
    modes it holds the fp32 master weights. micro_steps, global_steps, global_samples, skipped_steps: counters.
    """

    def __init__(
        self,
        ctx: Context,
        *,
        partitioner: Partitioner,
        runner: Runner,
        optimizer: Optimizer | None,
        lr_scheduler: Any,
        scaler: LossScaler | None,
        loader: DistributedLoader | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        reporter: Reporter,
    ) -> None:
        assert ctx.module is not None
        self.ctx, self.module = ctx, ctx.module
        self.partitioner, self.runner = partitioner, runner
        self.optimizer, self.lr_scheduler, self.scaler = optimizer, lr_scheduler, scaler
        self.training_dataloader, self._collate_fn = loader, collate_fn
        self.config = ctx.config
        self.monitor = reporter.monitor
        self.micro_steps = self.global_steps = self.global_samples = self.skipped_steps = 0
        self._batch = ctx.batch
        self._report = reporter
        self._timers = reporter.timers
        self._norm: float | None = None
        self._applied = False
        self._forced_boundary: bool | None = None
        self._managed = ctx.config.core.managed_gradient_accumulation
        self._quiet = self._coalescing = False  # inside no_sync, coalesce_grad_reduction
        self._window = partitioner.window = Window(self._batch.gas, counts=not self._managed)
        self._coming: Batch | None = None  # set in the middle of a window, for the next one
        self._train_iterator: Iterator[Any] | None = None
        self._given_iterator: Iterator[Any] | None = None
        core = ctx.config.core
        self._clip = core.gradient_clipping
        self._sum = ctx.mesh.size("dp") if core.gradient_allreduce_op == "sum" else 1
        self._global_norm = GradNorm(
            ctx.mesh,
            partitioner.axes(),
            lambda device, dtype: ctx.kernels.get("squared_norm", device, str(dtype).removeprefix("torch.")),
            like=[p for g in self._groups() for p in g["params"]],
        )
        # What every forward and backward would otherwise ask again.
        self._plain_forward = ctx.precision.autocast is None and not ctx.precision.cast_inputs and self._timers is None
        self._distributed = ctx.mesh.size("dp") > 1 or partitioner.partitions_gradients
        self._schedule_needs = required(lr_scheduler.step) if lr_scheduler is not None else ()
        self._num_optimized = sum(len(g["params"]) for g in self._groups())
        self.serial = STATE.next_serial()
        self._update_sync()
        STATE.engines.add(self)
        joint.enter(self.serial, partitioner, ctx.mesh, ctx.accelerator.current_device())
        STATE.taken[partitioner] = Taken(weakref.ref(self), weakref.ref(self.module))
        watch_zero_grad(self.optimizer, self.module)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("module", "partitioner"):
            raise AttributeError(name)
        if (method := self.partitioner.methods.get(name)) is not None:
            return functools.partial(method, self)
        try:
            return getattr(self.module, name)
        except AttributeError as error:
            raise no_attribute(self, name, error) from None

    # -- forward and backward --------------------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module; under the config's autocast, with inputs cast when ``fp16.auto_cast`` is set."""
        if not self.runner.manual:
            self._refuse_by_hand("forward")
        if self._plain_forward and not torch.is_autocast_enabled(self.ctx.accelerator.device_type):
            return self.module(*inputs, **kwargs)
        return self._forward(inputs, kwargs)

    __call__ = forward

    def _forward(self, inputs: Any, kwargs: Any) -> Any:
        if self.ctx.precision.cast_inputs:
            inputs, kwargs = cast_floats(inputs, torch.float16), cast_floats(kwargs, torch.float16)
        autocast = autocast_context(self.ctx.precision, self.ctx.accelerator)
        with self._report.phase("forward"), autocast or contextlib.nullcontext():
            return self.module(*inputs, **kwargs)

    def _refuse_by_hand(self, what: str) -> None:
        if not self.runner.manual:
            raise UsageError(f"{what} cannot be called by hand: {self.runner.manual_reason}")

    def scale(self, loss: Tensor) -> Tensor:
        """`loss` times the loss scale, for a ``loss.backward()`` of your own; unchanged without a loss scaler."""
        self._check_loss(loss)
        self._window.scaled = True
        return loss if self.scaler is None else loss * self.scaler.scale

    def backward(
        self,
        loss: Tensor,
        allreduce_gradients: bool = True,
        release_loss: bool = False,
        *,
        retain_graph: bool = False,
        scale_wrt_gas: bool = True,
    ) -> Tensor:
        """Scale `loss` (by the loss scale and 1/gas), run backward, and reduce gradients at the boundary.

        loss: 0-d tensor with a graph. allreduce_gradients: False is an error where there are other ranks to average
        with. scale_wrt_gas=False: the caller has divided by gas already.
        Returns the loss divided by gas, detached when `release_loss`.
        """
        if not allreduce_gradients and self.ctx.mesh.size("dp") > 1:
            raise UsageError(
                "backward(allreduce_gradients=False) would leave each rank to its own gradients, and weights would "
                "drift apart; to reduce several backwards once, put them into engine.no_sync() (stages 0 and 1) or "
                "engine.coalesce_grad_reduction()"
            )
        self._refuse_by_hand("backward")
        self._check_loss(loss)
        gas = self._batch.gas if scale_wrt_gas else 1
        self._backward(loss, gas, retain_graph)
        shown = loss / gas if gas > 1 else loss
        return shown.detach() if release_loss else shown

    def backward_micro(self, loss: Tensor, *, last: bool) -> None:
        """For runners: backward of one micro-batch's loss; gradients are reduced after the `last`."""
        self._check_loss(loss)
        self.partitioner.sync = last
        self._backward(loss, self._batch.gas, False)

    def _backward(self, loss: Tensor, gas: int, retain_graph: bool) -> None:
        self._window.drive()
        factor = self._factor(gas)
        root = loss * factor if factor != 1.0 else loss
        self._report.loss(loss if gas == self._batch.gas else loss.detach() * self._batch.gas)
        outer = STATE.driver, STATE.factor
        STATE.driver, STATE.factor = self.partitioner, self._factor()
        try:
            if not self._distributed and self._timers is None:
                root.backward(retain_graph=retain_graph)
                return
            with self._report.phase("backward"):
                self.partitioner.begin()
                with self._report.phase("backward_inner"):
                    root.backward(retain_graph=retain_graph)
                with self._report.phase("backward_allreduce"):
                    if STATE.joint is None:
                        self.partitioner.finish()
                    else:
                        STATE.joint.finish(self.partitioner)
        finally:
            STATE.driver, STATE.factor = outer

    def _factor(self, gas: int | None = None) -> float:
        """What losses are multiplied by before backward; gas: by how much they are divided, if not as usual."""
        return (self.scaler.scale if self.scaler is not None else 1.0) / (gas or self._batch.gas)

    def _check_loss(self, loss: Any) -> None:
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shown = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise UsageError(f"the loss must be a scalar tensor, got {shown}; reduce it with .mean() or .sum()")
        if loss.grad_fn is None:
            raise UsageError(
                "the loss has no graph (was it detached, or made under torch.no_grad()?), so nothing would be learnt"
            )

    # -- accumulation ----------------------------------------------------------------------------------------

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the coming `step` updates the weights."""
        if self._forced_boundary is not None:
            return self._forced_boundary
        return not self._managed or self._window.at_boundary

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Decide by hand whether the next `step` updates; None goes back to counting."""
        self._forced_boundary = is_boundary
        self._update_sync()

    def _update_sync(self) -> None:
        # Without managed accumulation any backward may be followed by another, so the step reduces.
        counted = self._managed or self._forced_boundary is not None
        self.partitioner.sync = (
            counted and not self._quiet and not self._coalescing and self.is_gradient_accumulation_boundary()
        )
        self.partitioner.hold = self._coalescing or self._quiet

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """No gradient is reduced inside; the backward after the block (or the step) reduces what has accumulated."""
        self._refuse_by_hand("no_sync")
        assert not self.partitioner.partitions_gradients, (
            "no_sync cannot be used when gradients are partitioned over ranks"
        )
        assert not self._quiet, "no_sync cannot be nested"
        assert not self._coalescing, "no_sync cannot be used inside coalesce_grad_reduction"
        self._quiet = True
        self._update_sync()
        try:
            yield
        finally:
            self._quiet = False
            self._update_sync()

    @contextlib.contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Several backwards inside, one reduction of their sum on exit (when at the boundary)."""
        self._refuse_by_hand("coalesce_grad_reduction")
        if self._coalescing or self._quiet:
            raise UsageError("coalesce_grad_reduction cannot be nested, neither in itself nor in no_sync")
        self._coalescing = True
        self._update_sync()
        try:
            yield
        finally:
            self._coalescing = False
            self._update_sync()
        self.partitioner.finish()

    # -- step ------------------------------------------------------------------------------------------------

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """At the accumulation boundary: unscale, clip, update, zero gradients, then step the schedule.

        Before the boundary it only counts. Overflowed (non-finite) gradients: no update, no schedule step,
        ``skipped_steps += 1``. lr_kwargs go to the schedule's ``step``. Collective at the boundary.
        """
        self._refuse_by_hand("step")
        if self._quiet or self._coalescing:
            raise UsageError(
                "step() inside no_sync() or coalesce_grad_reduction(): gradients are not reduced yet; call "
                "it after the block"
            )
        self._window.check(self._factor(), scales=self.scaler is not None)
        if self.is_gradient_accumulation_boundary():
            self._update(lr_kwargs)
        else:
            self._applied = False
            self._window.next_micro()
        self.micro_steps += 1
        self._update_sync()

    def _update(self, lr_kwargs: Mapping[str, Any] | None) -> None:
        """One optimizer step over gradients that all micro-batches have contributed to."""
        report = self._report
        if sum(len(g["params"]) for g in self._groups()) != self._num_optimized:
            raise UsageError(
                "parameters were added to the optimizer after initialize, which neither reduces nor clips "
                "them; give all "
                "groups to initialize (frozen parameters may be unfrozen later)"
            )
        if missing := [n for n in self._schedule_needs if n not in (lr_kwargs or {})]:
            raise UsageError(
                f"the schedule's step needs {', '.join(missing)}; give it with "
                f"engine.step(lr_kwargs={{{missing[0]!r}: ...}})"
            )
        report.step_begin(self.global_steps)
        with report.phase("step"):
            self.partitioner.sync = True
            self.partitioner.finish()
            unscale = self._sum / self.loss_scale / self._window.divisor
            raw = self._global_norm(self.partitioner.gradients(), self.ctx.accelerator.current_device())
            self._norm = raw * unscale
            overflow = not math.isfinite(raw)
            self._applied = not (overflow and self.ctx.precision.skip_nonfinite) and self.optimizer is not None
            if overflow:
                report.nonfinite(self.partitioner, self.ctx, self.scaler)
            if self._applied:
                clip = self._clip / (self._norm + 1e-6) if self._clip and not overflow else 1.0
                self.partitioner.step(self.optimizer, unscale * min(1.0, clip))  # type: ignore[arg-type]
                self.partitioner.publish()
            else:
                self.skipped_steps += 1
            self.partitioner.zero_grad()
            if self.scaler is not None:
                self.scaler.update(overflow)
        if self._applied and self.lr_scheduler is not None:
            self.lr_scheduler.step(**(lr_kwargs or {}))
        self.global_steps += 1
        batch = self._batch
        self.global_samples += batch.train if self._managed else batch.train // batch.gas * self._window.backwards
        report.step_end(self)
        self._begin_window()

    def was_step_applied(self) -> bool:
        """Whether the last `step` changed the weights."""
        return self._applied

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients. `step` has done so already; gradients are always dropped, not filled with zeros."""
        if not set_to_none:
            raise UsageError("zero_grad(set_to_none=False) is not supported: gradients are dropped, which costs less")
        for param in self.module.parameters():  # those that the optimizer does not have
            param.grad = None
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """Drop the gradients of the optimizer's parameters, and how they came about; the window goes on counting."""
        self.partitioner.zero_grad()
        self._window.drop()
        if STATE.joint is not None:
            STATE.joint.forget()
        self._report.drop_loss()

    def _begin_window(self) -> None:
        """No gradients are there; batch sizes that were set in the middle of a window hold from now on."""
        if (batch := self._coming) is not None:
            if self.training_dataloader is not None and batch.micro != self._batch.micro:
                self.training_dataloader.set_batch_size(batch.micro)
                self._train_iterator = None
            self._batch, self.ctx.batch, self._coming = batch, batch, None
            self.partitioner.rewatch()
        self._window.restart(self._batch.gas)
        if STATE.joint is not None:
            STATE.joint.forget()

    # -- whole batches ---------------------------------------------------------------------------------------

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """One optimizer step over gas micro-batches from `data_iter` (or the engine's own endless loader).

        Returns the mean loss over micro-batches and dp ranks, a 0-d tensor. Raises StopIteration when the iterator
        runs out; no weight has changed then.
        """
        if not torch.is_grad_enabled():
            raise UsageError("train_batch needs gradients; it was called under torch.no_grad()")
        if not self.module.training:
            self.module.train()
        batches = data_iter if data_iter is not None else self._own_batches()
        try:
            loss = self.runner.train(self, iter(batches), self._batch.gas)
        except BaseException:  # whatever stopped it, the next batch starts afresh
            self.partitioner.zero_grad()
            self._report.drop_loss()
            self._begin_window()
            self._update_sync()
            raise
        loss = self._mean_over_dp(loss)
        self._report.set_loss(loss)
        self._window.take_batch()
        self._update(None)
        self.micro_steps += self._batch.gas
        self._update_sync()
        return loss

    @torch.no_grad()
    def eval_batch(
        self,
        data_iter: Iterator[Any],
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """Forward of gas micro-batches in eval mode, without gradients.

        Returns the loss averaged over micro-batches and dp ranks (with `return_logits`: ``(loss, outputs)``; outputs
        alone when `compute_loss` is off). reduce_output: "avg", or None for the loss of this rank alone. bcast_loss:
        False leaves the loss where it was made, in a pipeline on the last stage; other ranks have None.
        """
        if reduce_output not in ("avg", None):
            raise UsageError(f"reduce_output={reduce_output!r}; it is 'avg' or None")
        modes = [(m, m.training) for m in self.module.modules()]
        self.module.eval()
        try:
            loss, outputs = self.runner.evaluate(
                self,
                iter(data_iter),
                num_micro_batches or self._batch.gas,
                return_logits=return_logits or not compute_loss,
                compute_loss=compute_loss,
            )
        finally:
            for module, mode in modes:
                module.training = mode
        if not compute_loss:
            return outputs
        if not bcast_loss and not self.runner.makes_loss:
            loss = None
        if loss is not None and reduce_output == "avg":
            loss = self._mean_over_dp(loss)
        return (loss, outputs) if return_logits else loss

    def _mean_over_dp(self, loss: Tensor) -> Tensor:
        if self.ctx.mesh.size("dp") == 1:
            return loss
        total = loss.detach().float() if loss.dtype in (torch.float16, torch.bfloat16) else loss.detach().clone()
        comm.all_reduce(total, group=self.ctx.mesh.group("dp"))
        return total / self.ctx.mesh.size("dp")

    def set_dataiterator(self, iterator: Iterator[Any]) -> None:
        """What `train_batch` takes its micro-batches from when it is given nothing."""
        self._given_iterator = iterator

    def set_dataloader(self, loader: Iterable[Any]) -> None:
        """The same, from a loader that is started again whenever it ends."""
        from ds_core.data import RepeatingLoader

        self._given_iterator = iter(RepeatingLoader(loader))

    def _own_batches(self) -> Iterator[Any]:
        if self._given_iterator is not None:
            return self._given_iterator
        if self.training_dataloader is None:
            raise UsageError(
                "train_batch() without an iterator needs training_data in initialize(), or set_dataiterator(); or pass "
                "an iterator"
            )
        if self._train_iterator is None:
            from ds_core.data import RepeatingLoader

            self._train_iterator = iter(RepeatingLoader(self.training_dataloader))
        return self._train_iterator

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> DistributedLoader:
        """A loader of this rank's share of `dataset`; shuffled for route "train", in order for any other."""
        mesh = self.ctx.mesh
        return DistributedLoader(
            dataset,
            batch_size or self._batch.micro,
            replicas=mesh.size("dp"),
            index=mesh.index("dp"),
            shuffle=route == "train",
            drop_last=self.config.core.dataloader_drop_last,
            collate_fn=collate_fn or self._collate_fn,
            num_workers=num_local_io_workers or 0,
            pin_memory=pin_memory and self.ctx.accelerator.device_type != "cpu",
            sampler=data_sampler,
        )

    # -- reading and setting ---------------------------------------------------------------------------------

    def train_batch_size(self) -> int:
        """Samples per optimizer step over all ranks."""
        return self._batch.train

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples per rank per forward."""
        return self._batch.micro

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per optimizer step."""
        return self._batch.gas

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the batch by changing the accumulation steps; a multiple of micro x dp (ValueError otherwise).

        In the middle of an accumulation window it holds from the next window on, and so do the getters.
        """
        self._set_batch(with_train_batch_size, train_batch_size)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the micro-batch, and with it the batch; accumulation steps stay. Takes effect as the train size does.

        The engine's own loader follows from its next iteration on (`train_batch` starts one at once).
        """
        self._set_batch(with_micro_batch_size, micro_batch_size)

    def _set_batch(self, change: Callable[[Batch, int, int], Batch], size: int) -> None:
        self._coming = change(self._coming or self._batch, size, self.ctx.mesh.size("dp"))
        if not self._window.open:
            self._begin_window()
            self._update_sync()

    def get_batch_info(self) -> tuple[int, int, int]:
        """(train_batch_size, micro batch size, accumulation steps)."""
        return self._batch.train, self._batch.micro, self._batch.gas

    def _groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups if self.optimizer is not None else []

    def get_lr(self) -> list[float]:
        """Learning rate of each parameter group."""
        return [float(g.get("lr", 0.0)) for g in self._groups()]

    def get_mom(self) -> list[Any]:
        """Momentum (or betas) of each parameter group."""
        return [g["momentum"] if "momentum" in g else g.get("betas") for g in self._groups()]

    def get_type(self) -> list[str | None]:
        """The ``type`` that each parameter group carries, if any."""
        return [g.get("type") for g in self._groups()]

    def get_global_grad_norm(self) -> float | None:
        """L2 norm of all gradients, unscaled, before clipping, at the last update; None before the first."""
        return self._norm

    @property
    def loss_scale(self) -> float:
        """The current loss scale; 1 without a scaler."""
        return self.scaler.scale if self.scaler is not None else 1.0

    def zero_optimization_partition_gradients(self) -> bool:
        """Whether gradients are partitioned over ranks (ZeRO stages 2 and 3), which rules out `no_sync`."""
        return self.partitioner.partitions_gradients

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

    def train(self, mode: bool = True) -> Engine:
        """Put the module into training mode (or evaluation)."""
        self.module.train(mode)
        return self

    def eval(self) -> Engine:
        """Put the module into evaluation mode."""
        return self.train(False)

    def compile(
        self,
        backend: str = "inductor",
        compile_kwargs: Mapping[str, Any] | None = None,
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """Compile the module's forward with torch.compile, in place. The last two arguments are refused when set."""
        if schedule is not None or compiled_autograd_enabled:
            which = "schedule" if schedule is not None else "compiled_autograd_enabled"
            raise UsageError(f"compile({which}=...): DeepCompile's graph passes are not built; leave it out")
        self.module.compile(backend=backend, **(compile_kwargs or {}))

    # -- checkpoints -----------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write all that a resumed run needs to ``save_dir/tag``; atomic. Every rank calls it.

        With ``checkpoint.async`` it returns when the states are copied, and writes while training goes on.
        """
        checkpoint.save(self, save_dir, tag, client_state, save_latest, exclude_frozen_parameters)
        return True

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
        """Read a checkpoint, saved at any world size; returns (path, client_state). Every rank calls it.

        Without a tag and without a file ``latest``: (None, None) and a warning, or (None, {}) with missing_ok.
        fallback: when it is damaged, take the newest that is not. The rest: `ds_core.checkpoint.loading.load`.
        """
        return checkpoint.load(
            self,
            load_dir,
            tag,
            load_module_strict=load_module_strict,
            load_optimizer_states=load_optimizer_states,
            load_lr_scheduler_states=load_lr_scheduler_states,
            load_module_only=load_module_only,
            custom_load_fn=custom_load_fn,
            missing_ok=missing_ok,
            fallback=fallback,
        )

    def wait_for_checkpoint(self) -> None:
        """Until a save under ``checkpoint.async`` is on the disk; raises what went wrong. Every rank calls it."""
        checkpoint.wait(self)

    def save_16bit_model(
        self, save_dir: str, save_filename: str = "model.safetensors", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Write the whole model's 16-bit weights as one safetensors file on rank 0; whether it did. Collective."""
        return checkpoint.save_16bit_model(self, save_dir, save_filename, exclude_frozen_parameters)

    save_fp16_model = save_16bit_model  # its old name

    def run_state(self) -> dict[str, Any]:
        """All that is not a tensor of the model: counters, scaler, hyperparameters, schedule, data position."""
        return run_state(self)

    def load_run_state(self, state: Mapping[str, Any], *, optimizer: bool = True, scheduler: bool = True) -> None:
        """The reverse of `run_state`; `optimizer` and `scheduler` say whether those parts are taken too."""
        load_run_state(self, state, optimizer=optimizer, scheduler=scheduler)
        self.partitioner.zero_grad()
        self._report.drop_loss()
        self._begin_window()
        self._train_iterator = None
        self._update_sync()

    def destroy(self) -> None:
        """Close monitors, remove hooks and free buffers; the module stays usable on its own.

        A checkpoint that is being saved is waited for. Any later use of the engine is an error, see `ds_core.ended`.
        """
        if self in STATE.engines:
            STATE.engines.discard(self)
            STATE.taken.pop(self.partitioner, None)
            joint.leave(self.serial)
            checkpoint.close(self)
            self._report.close()
            self.partitioner.detach()
            unwatch_zero_grad(self.optimizer, self.module)
            end(self)


def required(function: Callable[..., Any]) -> tuple[str, ...]:
    """Names of the arguments that `function` cannot be called without."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return ()
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return tuple(p.name for p in parameters if p.default is inspect.Parameter.empty and p.kind in named)
