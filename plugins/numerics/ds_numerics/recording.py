"""Records a step while it runs: by hooks of torch on the model, its tensors and its parameters, and
by an interceptor of collectives. They are there in steps that are due, and in no others.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from ds_run_state.changes import leaves, replace_leaves
from torch import Tensor, nn

from ds_core import comm
from ds_core.comm import Interceptor
from ds_core.comm.interceptor import OPERATIONS
from ds_numerics.events import (
    Backward,
    Buffers,
    Event,
    Forward,
    Kept,
    RandomStates,
)
from ds_numerics.trace import Kind, Trace

if TYPE_CHECKING:
    from ds_core.comm.interceptor import Collective
    from ds_core.context import Context


SUMS = ("all_reduce", "reduce_scatter_tensor")
"""The collectives that give the same result if all ranks send the same again."""


class Recording:
    """One step of one engine: what it did, and the checksums of the pass that runs."""

    events: list[Event]
    """In order, of the first pass."""
    trace: Trace
    """Of the pass that runs."""
    weights: Trace
    """The weights in memory, at the first forward."""
    refusal: str
    """Why the step cannot be computed again; "" if it can."""

    def __init__(self, ctx: Context) -> None:
        assert ctx.module is not None
        self.ctx = ctx
        self.module: nn.Module = ctx.module
        self.buffers = Buffers(self.module)
        self.events = []
        self.trace = Trace()
        self.weights = Trace()
        self.refusal = ""
        # The step that is recorded; -1: none has begun.
        self._step = -1
        # Whether events are recorded; a replay makes checksums alone.
        self._first = True
        # Whether the whole model's forward runs that is watched.
        self._inside = False
        # The forward and the backward that run, or ran last: their numbers in this pass.
        self.forward = -1
        self.backward = -1
        # torch's number of the backward that runs.
        self._graph = -1
        self._outputs: list[dict[int, Tensor]] = []
        self._handles: list[Any] = []
        self._wires = _Wires(self)
        self._watch()

    # -- hooks -------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Install all hooks."""
        model = self.module
        self._handles = [
            model.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True),
            model.register_forward_hook(self._after, with_kwargs=True, always_call=True),
        ]
        # What other modules change is seen in the output, or the gradient, of the next of these.
        for name, module in model.named_modules():
            if name and next(module.parameters(recurse=False), None) is not None:
                self._handles.append(module.register_forward_hook(partial(self._module, name)))
        for param in self.ctx.trained:
            if param.requires_grad:
                name = self.ctx.params[param].name
                self._handles.append(param.register_hook(partial(self._local, name)))
        comm.add_interceptor(self._wires)

    def close(self) -> None:
        """Remove all hooks, and forget what was kept."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        comm.remove_interceptor(self._wires)
        self.events.clear()
        self._outputs.clear()

    # -- passes ------------------------------------------------------------------------------------

    def _begin_step(self) -> None:
        """The first forward of a step begins."""
        self._step = self.ctx.engine.global_steps
        self.events.clear()
        self._outputs.clear()
        self.buffers = Buffers(self.module)
        self.trace = Trace()
        self.weights = Trace()
        self.refusal = ""
        self.forward = self.backward = -1
        self.add_weights(self.weights)

    @contextmanager
    def next_pass(self) -> Iterator[Trace]:
        """Inside, checksums go into a new trace, and no events are recorded."""
        self._first = False
        self.trace = Trace()
        self.forward = self.backward = -1
        self._outputs.clear()
        try:
            yield self.trace
        finally:
            self._outputs.clear()

    def outputs(self, forward: int) -> dict[int, Tensor]:
        """What a forward of the pass that runs has given: the tensors that need a gradient."""
        return self._outputs[forward]

    # -- the whole model ---------------------------------------------------------------------------

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        # An evaluation, or a recomputation, is no part of a step.
        if not module.training or not torch.is_grad_enabled() or in_backward():
            return
        # A step that was skipped, as its gradients were not finite, is not checked: this one is.
        if self._first and self._step != self.ctx.engine.global_steps:
            self._begin_step()
        self._inside = True
        self.forward += 1
        if not self._first:
            return
        if self._autocast_differs():
            self.refusal = "a forward ran under another autocast than the engine's"
        inputs = [Kept.of(leaf) for leaf in leaves((args, kwargs))]
        self.events.append(
            Forward(args, kwargs, inputs, RandomStates.now(self.ctx), self.buffers.copies())
        )

    def _after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        if not self._inside:
            return None
        self._inside = False
        if output is None:
            self.refusal = "a forward failed, or gave nothing"
        for name, buffer in module.named_buffers():
            self.trace.add(Kind.BUFFER, name, buffer, self.forward)
        if self._first:
            self.buffers.look()
        given: dict[int, Tensor] = {}
        self._outputs.append({} if self._first else given)
        numbers = itertools.count()

        def show(leaf: Tensor) -> Tensor:
            """What the caller gets of an output."""
            number = next(numbers)
            self.trace.add(Kind.OUTPUT, "", leaf, self.forward)
            if leaf.requires_grad:
                # A copy: a loss that the model makes of its logits gives those a gradient too, and
                # a replay needs what comes from outside the model alone. A view would lose its hook
                # where a program multiplies its loss in place.
                leaf = leaf.clone()
                leaf.register_hook(partial(self._output_gradient, self.forward, number))
                given[number] = leaf
            return leaf

        return replace_leaves(output, show)

    def _output_gradient(self, forward: int, number: int, grad: Tensor) -> None:
        """A backward comes to the model."""
        graph = torch._C._current_graph_task_id()
        if graph != self._graph:
            self._graph = graph
            self.backward += 1
            if self._first:
                self.events.append(Backward(self._plan(), RandomStates.now(self.ctx)))
        if self._first:
            event = self.events[-1]
            if not isinstance(event, Backward) or (forward, number) in event.gradients:
                self.refusal = "a forward ran, or a gradient came twice, inside a backward"
            else:
                event.gradients[forward, number] = Kept.of(grad.detach())

    def _plan(self) -> Any:
        hooks = self.ctx.engine.partitioner.gradient_hooks
        # Nobody's backward has the origin 0.
        plan = hooks.plan if hooks.origin else hooks.accumulation.plan
        if plan.keep_local:
            self.refusal = "gradients were kept back by no_sync() or coalesce_grad_reduction()"
        return plan

    def _autocast_differs(self) -> bool:
        kind = self.ctx.accelerator.device_type
        wanted = self.ctx.precision.autocast
        on = torch.is_autocast_enabled(kind)
        return on != (wanted is not None) or (on and torch.get_autocast_dtype(kind) != wanted)

    # -- parts of it -------------------------------------------------------------------------------

    def _module(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        # Inside a compiled function nothing is recorded.
        if torch.compiler.is_compiling() or not (self._inside or in_backward()):
            return
        for leaf in leaves(output):
            self.trace.add(Kind.OUTPUT, name, leaf, self.forward)

    def _local(self, name: str, grad: Tensor) -> None:
        self.trace.add(Kind.LOCAL_GRADIENT, name, grad, self.backward)

    def sent(self, label: str, tensor: Tensor) -> None:
        """A collective takes `tensor` from this rank."""
        # A backward may come through several engines, of which a replay runs one.
        if self.ctx.engine.partitioner.gradient_hooks.joint is not None:
            return
        # After a backward come the last reductions, and the program's own collectives.
        if self._inside or in_backward() or label.startswith("gradients"):
            self.trace.add(Kind.SENT, label or "a message", tensor, self.backward)

    def add_weights(self, trace: Trace) -> None:
        """Add the weights that are in memory; sharded ones are not, between forward and backward."""
        for param, info in self.ctx.params.items():
            if param.numel():
                trace.add(Kind.WEIGHT, info.name, param)


class _Wires(Interceptor):
    """Makes checksums of what this rank gives to sums over ranks."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording

    def around(self, collective: Collective, call: Callable[[], Any]) -> Any:
        """See `Interceptor.around`."""
        # Where weights come from may change from pass to pass, and messages of other kinds may have
        # padding.
        if collective.op in SUMS:
            self._recording.sent(collective.label, collective.arguments[OPERATIONS[collective.op]])
        return call()


def in_backward() -> bool:
    """Whether autograd runs a backward in this thread."""
    return bool(torch._C._current_graph_task_id() != -1)
