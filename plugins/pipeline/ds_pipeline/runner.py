"""The pipeline runner: executes schedules for train_batch and eval_batch."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ds_core import comm
from ds_core.errors import UsageError
from ds_core.params import COUNTED_ELSEWHERE
from ds_core.precision import cast_floats, forward_context
from ds_core.runner import Runner, check_loss, loss_of
from ds_pipeline.config import PipelineConfig
from ds_pipeline.layers.module import PipelineModule
from ds_pipeline.layers.tied_weights import Ties, copies_elsewhere
from ds_pipeline.micro_batches import BatchRequest, agree, signature, take_micro_batches, to_device
from ds_pipeline.schedules import schedule as s
from ds_pipeline.schedules.choose import find_schedule, make_schedule
from ds_pipeline.schedules.validate import ScheduleError, check
from ds_pipeline.split_backward import WeightBackward, backward_inputs
from ds_pipeline.transport import DTYPES, Incoming, Meta, StageTransport

if TYPE_CHECKING:
    from ds_core.context import Context
    from ds_core.running import RunningEngine

# of <malloc.h>
_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3

BY_HAND = (
    "the micro-batches of a pipeline run at the same time on its stages; use "
    "engine.train_batch(iterator) and "
    "engine.eval_batch(iterator)"
)


def _section(ctx: Context) -> PipelineConfig:
    section = ctx.config.section(PipelineConfig)
    assert section is not None
    return section


def prepare(model: nn.Module, ctx: Context) -> nn.Module:
    """Check that `model` was built for this run, and apply the config section to it."""
    if not isinstance(model, PipelineModule):
        raise UsageError(
            f"the config has a section pipeline, but the model is a {type(model).__name__}; give a "
            "PipelineModule"
        )
    section = _section(ctx)
    own = ("_grid", "activation_checkpoint_interval", "use_reentrant", "shapes_known")
    before = {name: vars(model)[name] for name in own}
    ctx.undo(lambda: vars(model).update(before))
    model.bind(ctx.mesh)
    ctx.undo(lambda: model.mpu().bind(None))
    if section.activation_checkpoint_interval:
        model.activation_checkpoint_interval = section.activation_checkpoint_interval
    model.use_reentrant = section.use_reentrant
    ctx.stash[COUNTED_ELSEWHERE] = {
        *(ctx.stash.get(COUNTED_ELSEWHERE) or ()),
        *copies_elsewhere(model),
    }
    return model


@dataclass(slots=True)
class _PipeBuffer:
    """A pipeline buffer: one micro-batch in one chunk.

    leaves: inputs from another stage, as autograd leaves. outputs: of the chunk. root_grads: the
    received gradients of those outputs that have one. input_grads: gradients to send. later,
    deferred: what is left of a split backward.
    """

    micro: int = -1
    inputs: Any = None
    leaves: list[Tensor] = field(default_factory=list)
    labels: Any = None
    outputs: list[Tensor] = field(default_factory=list)
    is_tuple: bool = False
    meta: Meta | None = None
    root_grads: list[Tensor] = field(default_factory=list)
    input_grads: list[Tensor] = field(default_factory=list)
    later: WeightBackward | None = None
    deferred: tuple[list[Tensor], list[Tensor]] | None = None


class PipelineRunner(Runner):
    """See `ds_core.runner.Runner`. Created on all ranks together.

    additional_losses: on the last stage, means of `get_additional_losses` over the last batch.
    """

    manual = False
    manual_reason = BY_HAND

    def __init__(self, ctx: Context) -> None:
        assert isinstance(ctx.module, PipelineModule)
        self.ctx = ctx
        self.module = ctx.module
        self.section = _section(ctx)
        self.stages = self.module.num_stages
        self.stage = self.module.stage_id
        self.chunks = self.module.chunks
        self.parts = self.stages * self.chunks
        split = (
            self.section.pipe_partitioned,
            self.section.pipe_partitioned and self.section.grad_partitioned,
        )
        # None: one of ds-pipeline's
        self._make_own = find_schedule(self.section.schedule, ctx.plugins)
        self.transport = StageTransport(ctx, self.stages, self.stage, self.chunks, split)
        self.ties = Ties(ctx, self.module)
        if ctx.accelerator.device_type == "cpu":
            _tune_malloc()
        self.makes_loss = self._has_last
        self.additional_losses: dict[str, float] = {}
        self._failed = False
        # partitioned gradients stay with their rank until the batch is over
        self._keep_local = False
        self._plans: dict[
            tuple[int, bool], tuple[list[s.PipeInstruction], list[Incoming], int]
        ] = {}
        self._signatures: dict[bool, Any] = {}
        self._handlers = {
            s.LoadMicroBatch: self._load,
            s.ForwardPass: self._forward,
            s.BackwardPass: self._backward,
            s.BackwardInput: self._backward_input,
            s.BackwardWeight: self._backward_weight,
            s.SendActivation: self._send_activation,
            s.RecvActivation: self._receive_activation,
            s.SendGrad: self._send_gradient,
            s.RecvGrad: self._receive_gradient,
            s.ReduceTiedGrads: self._reduce_ties,
            s.ReduceGrads: self._reduce,
            s.OptimizerStep: lambda what: None,  # the engine's, once `train` has returned
        }

    # -- batches -----------------------------------------------------------------------------------

    def train(self, engine: RunningEngine, batches: Iterator[Any], count: int) -> Tensor:
        """See `Runner.train`."""
        self._engine = engine
        self._count = count
        self._train = True
        self._with_loss = True
        self._keep_local = (
            engine.partitioner.partitions_gradients and self.section.reduce == "batch"
        )
        self._execute(batches, return_logits=False)
        loss = self._shared_loss()
        assert loss is not None
        return loss

    def evaluate(
        self,
        engine: RunningEngine,
        batches: Iterator[Any],
        count: int,
        *,
        return_logits: bool,
        compute_loss: bool = True,
    ) -> tuple[Tensor | None, Any]:
        """See `Runner.evaluate`; the outputs are on the last stage, the loss everywhere."""
        self._engine = engine
        self._count = count
        self._train = False
        self._with_loss = compute_loss
        self._execute(batches, return_logits=return_logits)
        outputs: Any = None
        if return_logits and self._has_last:
            outputs = self._logits if count > 1 else self._logits[0]
        return self._shared_loss() if compute_loss else None, outputs

    def _execute(self, batches: Iterator[Any], *, return_logits: bool) -> None:
        commands, incoming, most = self._plan(self._count, self._train)
        self._buffers: dict[tuple[int, int], _PipeBuffer] = {}
        self._loss: Tensor | None = None
        self._keep = return_logits
        self._logits: list[Any] = []
        self._extra: dict[str, float] = {}
        self._loaded = dict.fromkeys(range(self.chunks), 0)
        self._micros, headers, signature = self._pull(batches)
        self._failed = True  # until all is done; see `_pull`
        if self._train:
            self.ties.begin()
        self.transport.begin(incoming, train=self._train, headers=headers, most=most)
        for what in commands:
            self._handler(what)(what)
        self.transport.finish()
        self._failed = False
        self._signatures[self._train] = signature
        self.module.shapes_known = True
        self._buffers.clear()
        self._micros = []
        self.additional_losses = {k: v / self._count for k, v in self._extra.items()}

    def _handler(self, what: s.PipeInstruction) -> Any:
        for kind in type(what).__mro__:
            if kind in self._handlers:
                return self._handlers[kind]
        raise UsageError(
            f"the schedule has an instruction {what!r}, which this runner does not support"
        )

    @property
    def _has_last(self) -> bool:
        return self.stage == self.stages - 1

    def _pull(self, batches: Iterator[Any]) -> tuple[list[Any], str, Any]:
        """All micro-batches, before any work: (they, which headers are due, the shapes of the
        inputs).

        Raises StopIteration on every rank when any has too few.
        """
        if self._failed:
            raise UsageError(
                "an earlier batch failed in its middle on this rank, and messages of it may still "
                "be under way; start "
                "the processes again, from a checkpoint"
            )
        micros: list[tuple[Any, Any]] = []
        short = False
        trouble = None
        try:
            if self.stage == 0 or self._has_last:
                micros = take_micro_batches(
                    batches,
                    self._count,
                    self.module.batch_fn,
                    self._with_loss and self.module.has_loss,
                )
                if (cut := self.module.cut_batch) is not None:
                    micros = [cut(*pair) for pair in micros]
        except StopIteration:
            short = True
        except Exception as error:  # all shall know; it is raised below
            trouble = error
        shapes = [signature(inputs) for inputs, _ in micros] if self.stage == 0 else []
        mixed = self.module.dynamic_shape or any(x != shapes[0] for x in shapes)
        known = self.module.shapes_known and self._signatures.get(self._train) == (
            shapes[0] if shapes else None
        )
        work = BatchRequest(self._count, self._train, self._with_loss)
        thawed = self._train and self.ties.changed
        word = agree(
            self.ctx,
            work,
            [short, mixed, not known and self.stage == 0, trouble is not None, thawed],
        )
        if trouble is not None:
            raise trouble
        if word[3]:
            raise UsageError(
                "lost this batch: a peer failed while it read its micro-batches; see its error"
            )
        if word[0]:
            raise StopIteration
        if word[4]:
            self.ties.agree()
        headers = "each" if word[1] else "first" if word[2] else "none"
        return micros, headers, None if word[1] or not shapes else shapes[0]

    def _shared_loss(self) -> Tensor | None:
        """The last stage's mean loss, on every stage."""
        device = self.ctx.accelerator.current_device()
        loss = torch.zeros(2, dtype=torch.float64, device=device)
        if self._has_last:
            assert self._loss is not None
            loss[0], loss[1] = (
                self._loss.double() / self._count,
                float(DTYPES.index(self._loss.dtype)),
            )
        if self.stages > 1:
            mesh = self.ctx.mesh
            comm.label("loss")
            comm.broadcast(loss, src=mesh.ranks("pp")[-1], group=mesh.group("pp"))
        return loss[0].to(DTYPES[int(loss[1].item())])

    # -- plans -------------------------------------------------------------------------------------

    def _make(self, count: int, train: bool, stage: int) -> s.PipeSchedule:
        name = self.section.schedule
        return make_schedule(
            name, count, self.stages, stage, self.chunks, train=train, make=self._make_own
        )

    def _plan(self, count: int, train: bool) -> tuple[list[s.PipeInstruction], list[Incoming], int]:
        """This stage's instructions, the messages it receives, and how many sends may be in flight;
        checked once.
        """
        if (count, train) not in self._plans:
            mine = self._make(count, train, self.stage)
            most = self._prove(
                lambda stage: self._make(count, train, stage), type(mine).__name__, count, train
            )
            commands = [what for step in mine for what in step]
            incoming = [
                self._incoming(w) for w in commands if isinstance(w, (s.RecvActivation, s.RecvGrad))
            ]
            self._plans[count, train] = commands, incoming, most
        return self._plans[count, train]

    def _prove(
        self, make: Callable[[int], s.PipeSchedule], name: str, count: int, train: bool
    ) -> int:
        """How many messages may be under way from a stage; UsageError for a schedule that is
        wrong."""
        try:
            most = max(check(make, train=train).activations) + 1
            while most < count * self.chunks:
                try:
                    check(make, train=train, capacity=most)
                    break
                except ScheduleError:
                    most *= 2
        except ScheduleError as error:
            raise UsageError(f"pipeline.schedule: {name} is wrong: {error}") from error
        return most

    def _incoming(self, what: s.BufferOpInstruction) -> Incoming:
        return Incoming("act" if isinstance(what, s.RecvActivation) else "grad", self._part(what))

    def _part(self, what: s.BufferOpInstruction) -> int:
        return what.chunk * self.stages + self.stage

    def _buffer(self, what: s.BufferOpInstruction) -> _PipeBuffer:
        return self._buffers.setdefault((what.chunk, what.buffer_id), _PipeBuffer())

    # -- instructions ------------------------------------------------------------------------------

    def _load(self, what: s.BufferOpInstruction) -> None:
        micro = self._loaded[what.chunk]
        self._loaded[what.chunk] += 1
        inputs, labels = self._micros[micro]
        part = self._part(what)
        device = self.ctx.accelerator.current_device()
        if part == 0:
            inputs = to_device(inputs, device)
            if (dtype := self.ctx.precision.cast_inputs) is not None:
                inputs = cast_floats(inputs, dtype)
            self._buffers[what.chunk, what.buffer_id] = _PipeBuffer(inputs=inputs)
        if part == self.parts - 1:
            self._buffer(what).labels = to_device(labels, device)

    def _receive_activation(self, what: s.BufferOpInstruction) -> None:
        meta, tensors = self.transport.receive_activation(self._part(what))
        buffer = self._buffers[what.chunk, what.buffer_id] = _PipeBuffer(
            labels=self._buffer(what).labels
        )
        if self._train:
            buffer.leaves = [
                t.requires_grad_()
                for t, (_, _, incoming) in zip(tensors, meta.tensors, strict=True)
                if incoming
            ]
        buffer.inputs = tuple(tensors) if meta.is_tuple else tensors[0]

    def _forward(self, what: s.BufferOpInstruction) -> None:
        buffer = self._buffer(what)
        last = self._part(what) == self.parts - 1
        inputs = buffer.inputs
        if buffer.leaves and self.module.changes_inputs(what.chunk):
            # A leaf cannot be changed in place.
            inputs = (
                inputs.clone() if isinstance(inputs, Tensor) else tuple(t.clone() for t in inputs)
            )
        context = forward_context(self.ctx.precision, self.ctx.accelerator)
        given: Any = ((inputs,), {}) if self._part(what) == 0 else None
        with self._engine.telemetry.phase("forward", given), context or contextlib.nullcontext():
            self._compute(buffer, inputs, what.chunk, last)

    def _compute(self, buffer: _PipeBuffer, inputs: Any, chunk: int, last: bool) -> None:
        out = self.module(inputs, chunk=chunk)
        buffer.inputs = None
        if not last:
            buffer.is_tuple = isinstance(out, tuple)
            buffer.outputs = list(out) if isinstance(out, tuple) else [out]
            if wrong := [type(t).__name__ for t in buffer.outputs if not isinstance(t, Tensor)]:
                raise UsageError(
                    f"stage {self.stage} gives a {wrong[0]}; a layer's outputs are a tensor or a "
                    "tuple of tensors"
                )
            return
        if self._keep:
            self._logits.append(out)
        if not self._with_loss:
            return
        loss = self.module.loss_fn(out, buffer.labels) if self.module.loss_fn is not None else out
        loss = loss_of(loss)
        shown = loss.detach()
        self._loss = shown if self._loss is None else self._loss + shown
        for name, value in (self.module.get_additional_losses() or {}).items():
            self._extra[name] = self._extra.get(name, 0.0) + float(value)
        if self._train:
            check_loss(loss)
            factor = self._engine.loss_factor(self._count)
            buffer.outputs = [loss * factor if factor != 1.0 else loss]

    def _send_activation(self, what: s.BufferOpInstruction) -> None:
        buffer = self._buffer(what)
        buffer.meta = self.transport.send_activation(
            self._part(what) + 1, buffer.outputs, buffer.is_tuple
        )
        if not self._train:
            buffer.outputs = []

    def _receive_gradient(self, what: s.BufferOpInstruction) -> None:
        buffer = self._buffer(what)
        assert buffer.meta is not None
        buffer.root_grads = self.transport.receive_gradient(self._part(what), buffer.meta)

    def _send_gradient(self, what: s.BufferOpInstruction) -> None:
        buffer = self._buffer(what)
        self.transport.send_gradient(self._part(what) - 1, buffer.input_grads)
        buffer.input_grads = []

    def _take_roots(self, buffer: _PipeBuffer) -> tuple[list[Tensor], list[Tensor]]:
        """The outputs to start backward from, and their gradients; the buffer lets go of them."""
        roots = [t for t in buffer.outputs if t.requires_grad]
        grads = buffer.root_grads or [torch.ones_like(t) for t in roots]
        buffer.outputs = []
        buffer.root_grads = []
        return roots, grads

    def _backward(self, what: s.BufferOpInstruction) -> None:
        buffer = self._buffer(what)
        self._run_backward(*self._take_roots(buffer))
        self._collect(buffer)

    def _run_backward(self, roots: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        self._engine.run_backward(
            lambda: torch.autograd.backward(roots, grads) if roots else None,
            keep_local=self._keep_local,
        )

    def _collect(self, buffer: _PipeBuffer) -> None:
        """The inputs' gradients; zeros for one that was not used."""
        buffer.input_grads = [
            t.grad if t.grad is not None else torch.zeros_like(t) for t in buffer.leaves
        ]
        buffer.leaves = []

    def _backward_input(self, what: s.BufferOpInstruction) -> None:
        """The first half.

        Nobody waits for a first part, which does all in the second; some graphs cannot be cut.
        """
        buffer = self._buffer(what)
        roots, grads = self._take_roots(buffer)
        if not buffer.leaves:
            buffer.deferred = roots, grads
            return
        if not self._can_cut(roots):
            self._run_backward(roots, grads)
            self._collect(buffer)
            return

        def backward() -> None:
            buffer.later = backward_inputs(roots, grads, buffer.leaves)

        self._engine.run_backward(backward, keep_local=self._keep_local)
        self._collect(buffer)

    def _can_cut(self, roots: Sequence[Tensor]) -> bool:
        """Whether backward can be split: not if activations are recomputed or weights are released
        after forward.
        """
        if self.module.activation_checkpoint_interval or self._engine.partitioner.releases_weights:
            return False
        return bool(roots) and all(t.grad_fn is not None for t in roots)

    def _backward_weight(self, what: s.BufferOpInstruction) -> None:
        buffer = self._buffer(what)
        if buffer.deferred is not None:
            self._run_backward(*buffer.deferred)
            buffer.deferred = None
        elif buffer.later is not None:
            self._engine.run_backward(buffer.later.run, keep_local=self._keep_local)
            buffer.later = None

    def _reduce_ties(self, what: s.PipeInstruction) -> None:
        self.ties.reduce(self._engine.partitioner)

    def _reduce(self, what: s.PipeInstruction) -> None:
        self._engine.reduce_gradients()


def _tune_malloc() -> None:
    """Let glibc keep up to 1 GB of freed memory, instead of paging it in anew for every
    micro-batch.

    By itself it gives back what lies idle beyond 128 KB to 64 MB (mallopt(3)). Left alone where the
    environment says what to keep. Measured: 5 % of a step of 200 ms with 64 MB, another 1 to 2 %
    with this.
    """
    keep = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if keep is not None and not any(
        n.startswith(("MALLOC_", "GLIBC_TUNABLES")) for n in os.environ
    ):
        for parameter, size in ((_MMAP_THRESHOLD, 32 << 20), (_TRIM_THRESHOLD, 1 << 30)):
            keep(ctypes.c_int(parameter), ctypes.c_int(size))
