"""The engine: forward, backward, step.

It contains no feature; a partitioner, a runner and hooks do the work.

One step: gradients are final (`Partitioner.finish`) -> norm, the same on all ranks -> not finite:
skip -> unscale and clip in one pass -> optimizer -> publish -> schedule -> observers and monitors.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ds_core.config.core import with_micro_batch_size, with_train_batch_size
from ds_core.engine.runner import Batches, Runner, check_loss, eval_mode, mean_over_dp
from ds_core.engine.running import RunningEngine
from ds_core.engine.telemetry import Telemetry
from ds_core.errors import PluginError, UsageError
from ds_core.gradients import (
    KEEP,
    LATER,
    REDUCE,
    Accumulation,
    BackwardPlan,
    GradientHooks,
    Origin,
    unwatch_zero_grad,
    watch_zero_grad,
)
from ds_core.partition import Partitioner, WeightUpdate
from ds_core.plugins.calls import Answer
from ds_core.precision import cast_floats, forward_context
from ds_core.process import STATE

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from ds_core.context import Context
    from ds_core.engine import Loader
    from ds_core.engine.methods import PluginMethods
    from ds_core.entries import Request
else:
    PluginMethods = object


class Engine(RunningEngine, PluginMethods):
    """A model being trained, made by `ds_core.initialize`.

    Unknown attributes are methods of plugins that take part (`ds_engine_methods`), then the
    module's, then methods of installed backends. Type checkers know the methods of this
    repository's packages (``methods.pyi``), and no others, so that a misspelt name is an error.

    Its parts, counters and getters: `RunningEngine`.
    """

    def __init__(
        self,
        ctx: Context,
        *,
        partitioner: Partitioner,
        runner: Runner,
        optimizer: Optimizer | None,
        lr_scheduler: Any,
        loader: Loader | None = None,
    ) -> None:
        # -- the parts that were made for it
        assert ctx.module is not None
        self.ctx = ctx
        self.config = ctx.config
        self.module = ctx.module
        self.partitioner = partitioner
        self.runner = runner
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.scaler = ctx.precision.scaler() if ctx.precision.scaler is not None else None
        self.training_dataloader = loader
        ctx.engine_ref = weakref.ref(self)

        # -- what plugins are told, and what they give
        self.telemetry = Telemetry(ctx)
        self.monitor = self.telemetry.monitor
        # Answers until they are first asked for, then functions.
        self._methods: dict[str, Any] = {}
        self.add_methods(ctx.plugins.merged("ds_engine_methods"))

        # -- the way of a gradient: from a backward, through a window, to an update
        self._batches = Batches(loader)
        self._hooks = GradientHooks(self)
        self._window = self._hooks.window
        self._accumulation = Accumulation(ctx, partitioner, self._hooks, self._batches)
        self._weight_update = WeightUpdate(self)
        self._follow_phases()
        self.serial = self._hooks.serial
        # Their own `zero_grad` would leave gradients in buckets, shards and accumulators.
        watch_zero_grad(self.optimizer, self.module)

    def begin(self) -> None:
        """Call plugins' `ds_open`, and begin to call observers; the last act of `initialize`.

        Raises what a plugin raises; the engine is to be destroyed then, on all ranks.
        """
        self.ctx.plugins.ask("ds_open", ctx=self.ctx)
        self.telemetry.begin()
        self._follow_phases()

    def _forwarded(self, name: str) -> Any:
        # The next lines read these two: before they are set that would never end.
        if name.startswith("__") or name in ("module", "_methods"):
            raise AttributeError(name)
        if (method := self._methods.get(name)) is not None:
            if isinstance(method, Answer):
                method = self._methods[name] = method.resolve(method.value, f"engine.{name}")
            return functools.partial(method, self)
        try:
            return getattr(self.module, name)
        except AttributeError as error:
            from ds_core.catalogue import find_elsewhere

            return find_elsewhere(self, name, error)

    if not TYPE_CHECKING:
        __getattr__ = _forwarded

    def add_methods(self, given: Mapping[str, Answer]) -> None:
        """Take what plugins answer to ``ds_engine_methods``.

        Raises PluginError for a name that is taken.
        """
        taken = {*dir(self), *self._methods}
        for name in given.keys() & taken:
            raise PluginError(
                f"ds_engine_methods: plugin {given[name].plugin} gives {name!r}, which the engine "
                "has itself"
            )
        self._methods |= given

    def _follow_phases(self) -> None:
        """Look up once per step whether phases are observed, for its forwards and backwards."""
        followed = self.telemetry.follows_phases
        self._plain_forward = self.ctx.precision.plain_forward and not followed
        self._phase = self.telemetry.phase if followed else None

    # -- forward and backward ----------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module under the config's autocast; ``fp16.auto_cast`` casts its inputs."""
        if not self.runner.manual:
            self._refuse_by_hand("forward")
        if self._plain_forward and not torch.is_autocast_enabled(self.ctx.accelerator.device_type):
            return self.module(*inputs, **kwargs)
        return self._forward(inputs, kwargs)

    __call__ = forward

    def _forward(self, inputs: Any, kwargs: Any) -> Any:
        if (dtype := self.ctx.precision.cast_inputs) is not None:
            inputs = cast_floats(inputs, dtype)
            kwargs = cast_floats(kwargs, dtype)
        context = forward_context(self.ctx.precision, self.ctx.accelerator)
        with self.telemetry.phase("forward", (inputs, kwargs)), context or contextlib.nullcontext():
            return self.module(*inputs, **kwargs)

    def _refuse_by_hand(self, what: str) -> None:
        if not self.runner.manual:
            raise UsageError(f"{what} cannot be called explicitly: {self.runner.manual_reason}")

    def scale(self, loss: Tensor) -> Tensor:
        """`loss` times the loss scale, for your own ``loss.backward()``; without a scaler, `loss`."""
        check_loss(loss)
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
        """Scale `loss`, run backward, and reduce gradients at the accumulation boundary.

        loss: 0-d tensor with a graph.
        allreduce_gradients: False is an error where there are other ranks to average with.
        scale_wrt_gas: divide by gas; False: the caller has done so already.

        Returns the loss divided by gas, detached when `release_loss`.
        """
        if not allreduce_gradients and self.ctx.mesh.size("dp") > 1:
            raise UsageError(
                "backward(allreduce_gradients=False) would leave each rank to its own gradients, "
                "and weights would drift apart; to reduce several backwards once, put them into "
                "engine.no_sync() or engine.coalesce_grad_reduction()"
            )
        self._refuse_by_hand("backward")
        check_loss(loss)
        gas = self.ctx.batch.gas if scale_wrt_gas else 1
        self._backward(loss, gas, retain_graph)
        shown = loss / gas if gas > 1 else loss
        return shown.detach() if release_loss else shown

    def backward_micro(self, loss: Tensor, *, last: bool) -> None:
        """See `RunningEngine.backward_micro`."""
        check_loss(loss)
        self._backward(loss, self.ctx.batch.gas, False, REDUCE if last else LATER)

    def _backward(
        self, loss: Tensor, gas: int, retain_graph: bool, plan: BackwardPlan | None = None
    ) -> None:
        self._window.add(Origin.ENGINE)
        # One multiplication for the loss scale and the division by gas, and none for a factor of 1.
        factor = self.loss_factor(gas)
        root = loss * factor if factor != 1.0 else loss
        # Telemetry divides by the window's gas, also where the caller has divided already.
        wanted = self.ctx.batch.gas
        self.telemetry.loss(loss if gas == wanted else loss.detach() * wanted)
        self._hooks.run(
            lambda: root.backward(retain_graph=retain_graph),
            self.loss_factor(),
            self._phase,
            plan=plan,
        )

    def run_backward(self, backward: Callable[[], object], *, keep_local: bool = False) -> None:
        """See `RunningEngine.run_backward`."""
        self._hooks.run(
            backward,
            self.loss_factor(),
            self._phase,
            plan=KEEP if keep_local else LATER,
            alike=False,
        )

    def reduce_gradients(self) -> None:
        """See `RunningEngine.reduce_gradients`."""
        self.partitioner.finish(REDUCE)

    # -- accumulation ------------------------------------------------------------------------------

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the coming `step` updates the weights."""
        return self._accumulation.at_boundary

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Decide explicitly whether the next `step` updates; None goes back to counting."""
        self._accumulation.force_boundary(is_boundary)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Reduce no gradient inside; the next backward (or the step) reduces their sum."""
        self._refuse_by_hand("no_sync")
        return self._accumulation.no_sync()

    def coalesce_grad_reduction(self) -> contextlib.AbstractContextManager[None]:
        """Several backwards inside, one reduction of their sum on exit (when at the boundary)."""
        self._refuse_by_hand("coalesce_grad_reduction")
        return self._accumulation.coalesced()

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the batch by its accumulation steps; ValueError unless a multiple of micro x dp.

        In the middle of an accumulation window it holds from the next window on, and so do the
        getters.
        """
        self._accumulation.set_batch(with_train_batch_size, train_batch_size)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the micro-batch, and with it the batch; accumulation steps stay the same.

        Takes effect when a new train batch size would.

        The engine's own loader follows from its next iteration on (`train_batch` starts one at
        once).
        """
        self._accumulation.set_batch(with_micro_batch_size, micro_batch_size)

    # -- step --------------------------------------------------------------------------------------

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """Update the weights at the accumulation boundary.

        At the boundary: unscale, clip, update, zero the gradients, then step the schedule.

        Before the boundary it only counts. Overflowed (non-finite) gradients: no update, no
        schedule step, ``skipped_steps += 1``. lr_kwargs go to the schedule's ``step``. Collective
        at the boundary.
        """
        self._refuse_by_hand("step")
        self._accumulation.check_step(self.loss_factor(), scales=self.scaler is not None)
        requests: list[Request] = []
        if self._accumulation.at_boundary:
            requests = self._update(lr_kwargs or {})
        else:
            self._applied = False
            self._accumulation.next_micro()
        self._end_step(1, requests)

    def _update(self, lr_kwargs: Mapping[str, Any]) -> list[Request]:
        """Step the optimizer and the schedule, and report; returns what plugins ask for."""
        self._weight_update.check(self, lr_kwargs)
        self.telemetry.step_begin(self.global_steps)
        with self.telemetry.phase("step"):
            self._norm, self._applied = self._weight_update(self)
        if not self._applied:
            self.skipped_steps += 1
        elif self.lr_scheduler is not None:
            self.lr_scheduler.step(**lr_kwargs)
        self.global_steps += 1
        self.global_samples += self._accumulation.samples()
        requests = self.telemetry.step_end(self)
        # Other observers may listen to the phases of the next step.
        if self.telemetry.follows_phases is not (self._phase is not None):
            self._follow_phases()
        self._accumulation.begin_window()
        return requests

    def _end_step(self, micro_steps: int, requests: list[Request]) -> None:
        """Be ready for the next backward, and do what plugins asked for; the same on all ranks."""
        self.micro_steps += micro_steps
        for request in requests:
            self.should_stop |= request.stop
            if request.save is not None:
                self.save_checkpoint(request.save)
            # A program that ends now would lose a checkpoint that is not durable yet.
            if request.exit_code:
                self.wait_for_checkpoint()
                raise SystemExit(request.exit_code)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients.

        `step` has done so already; gradients are always dropped, not filled with zeros.
        """
        if not set_to_none:
            raise UsageError(
                "zero_grad(set_to_none=False) is not supported: gradients are dropped, which costs "
                "less"
            )
        for param in self.module.parameters():  # those that the optimizer does not have
            param.grad = None
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """Drop the gradients of the optimizer's parameters; the accumulation window continues."""
        self._accumulation.drop_gradients()
        self.telemetry.drop_loss()

    # -- whole batches -----------------------------------------------------------------------------

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """One optimizer step over gas micro-batches from `data_iter`, or the engine's own loader.

        Tensors in batches, also nested ones, are brought to the accelerator's device, and so they
        are in `eval_batch`. Returns the mean loss over micro-batches and dp ranks, a 0-d tensor.
        Raises StopIteration when the iterator runs out; no weight has changed then.
        """
        if not torch.is_grad_enabled():
            raise UsageError("train_batch needs gradients; it was called under torch.no_grad()")
        if not self.module.training:
            self.module.train()
        batches = data_iter if data_iter is not None else self._batches.iterator()
        gas = self.ctx.batch.gas
        try:
            loss = self.runner.train(self, iter(batches), gas)
            self._hooks.finish_joint()  # of backwards that ranks ran at different times
        except BaseException:  # whatever stopped it, the next batch starts afresh
            self._drop_window()
            raise
        loss = mean_over_dp(loss, self.ctx.mesh)
        self.telemetry.set_loss(loss)
        self._window.add_batch()
        self._end_step(gas, self._update({}))
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

        Returns the loss averaged over micro-batches and dp ranks (with `return_logits`: ``(loss,
        outputs)``; outputs alone when `compute_loss` is off). reduce_output: "avg", or None for the
        loss of this rank alone. bcast_loss: False leaves the loss on the ranks that made it
        (`Runner.makes_loss`); others have None.
        """
        if reduce_output not in ("avg", None):
            raise UsageError(f"reduce_output={reduce_output!r}; it is 'avg' or None")
        count = num_micro_batches or self.ctx.batch.gas
        wants_outputs = return_logits or not compute_loss
        with self.telemetry.evaluation() as metrics:
            with eval_mode(self.module):
                loss, outputs = self.runner.evaluate(
                    self,
                    iter(data_iter),
                    count,
                    return_logits=wants_outputs,
                    compute_loss=compute_loss,
                )
            if not compute_loss or (not bcast_loss and not self.runner.makes_loss):
                loss = None
            if loss is not None and reduce_output == "avg":
                loss = mean_over_dp(loss, self.ctx.mesh)
            if loss is not None:
                metrics["loss"] = loss
        if not compute_loss:
            return outputs
        return (loss, outputs) if return_logits else loss

    def set_dataiterator(self, iterator: Iterator[Any]) -> None:
        """What `train_batch` takes its micro-batches from when it is given nothing."""
        self._batches.given = iterator

    # -- the module --------------------------------------------------------------------------------

    def train(self, mode: bool = True) -> Engine:
        """Put the module into training mode (or evaluation)."""
        self.module.train(mode)
        return self

    def eval(self) -> Engine:
        """Put the module into evaluation mode."""
        return self.train(False)

    def compile(self, *arguments: Any, **options: Any) -> None:
        """Compile the model in place: `compile_model` of the package dscore-compile."""
        self.compile_model(*arguments, **options)

    # -- the end -----------------------------------------------------------------------------------

    def begin_anew(self) -> None:
        """See `RunningEngine`."""
        self._drop_window()
        self._batches.restart()
        self.telemetry.turn(self.global_steps + 1)  # the counter may be a checkpoint's
        self._follow_phases()

    def _drop_window(self) -> None:
        self.partitioner.zero_grad()
        self.telemetry.drop_loss()
        self._accumulation.begin_window()

    def destroy(self) -> None:
        """Close monitors, free buffers, and give the module back with full weights. Collective.

        A checkpoint that is being saved is waited for. Any later use of the engine is an error, but
        for its counters. While an exception passes, other ranks may not be here: what takes them
        (`Undo`) waits for the next `initialize` on the module.
        """
        if self.serial in STATE.members:
            # Destroyed by a ``finally`` while an exception ends training?
            error = sys.exc_info()[1]
            self._hooks.close()
            self.close_checkpointer()
            self.telemetry.close(error)
            self.partitioner.detach()
            unwatch_zero_grad(self.optimizer, self.module)
            self.__class__ = DestroyedEngine
            self.ctx.undo.run(alone=error is not None and self.world_size > 1)


class DestroyedEngine(Engine):
    """What an engine is after `destroy`: its hooks are gone, so it would train each rank alone.

    The class of the object is changed rather than asked for at each call, which would cost every
    forward.
    """

    _left = frozenset(
        {"module", "destroy", "config", "ctx", "serial", "global_rank", "world_size", "should_stop"}
    )
    # Programs that end report them.
    _left |= {"micro_steps", "global_steps", "global_samples", "skipped_steps"}

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("__") or name in DestroyedEngine._left:
            return object.__getattribute__(self, name)
        raise UsageError(
            f"engine.{name}: this engine was destroyed (by destroy(), or by a second initialize on "
            "its model); use the engine that initialize made last, or the plain engine.module"
        )
