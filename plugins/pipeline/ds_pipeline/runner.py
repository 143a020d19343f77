"""The pipeline runner: executes schedules for train_batch and eval_batch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ds_core import comm
from ds_core.engine import Runner, check_loss, loss_of
from ds_core.errors import UsageError
from ds_core.partition import COUNTED_ELSEWHERE
from ds_core.precision import cast_floats, forward_context
from ds_pipeline.config import PipelineConfig
from ds_pipeline.layers.module import PipelineModule
from ds_pipeline.layers.tied_weights import Ties, copies_elsewhere
from ds_pipeline.malloc import tune_malloc
from ds_pipeline.micro_batches import BatchRequest, agree, signature, take_micro_batches, to_device
from ds_pipeline.schedules import schedule as s
from ds_pipeline.schedules.plans import StagePlans
from ds_pipeline.split_backward import WeightBackward, backward_inputs
from ds_pipeline.transport import DTYPES, Incoming, Meta, StageTransport

if TYPE_CHECKING:
    from ds_core.context import Context
    from ds_core.engine import RunningEngine

RECEIVES = (s.RecvActivation, s.RecvGrad)

BY_HAND = (
    "the micro-batches of a pipeline run at the same time on its stages; use "
    "engine.train_batch(iterator) and engine.eval_batch(iterator)"
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
    # A model may be given to another engine afterwards: what is set here is taken back at its end.
    own = ("_grid", "activation_checkpoint_interval", "use_reentrant", "shapes_known")
    before = {name: vars(model)[name] for name in own}
    ctx.undo(lambda: vars(model).update(before))
    model.bind(ctx.mesh)
    ctx.undo(lambda: model.mpu().bind(None))
    if section.activation_checkpoint_interval:
        model.activation_checkpoint_interval = section.activation_checkpoint_interval
    model.use_reentrant = section.use_reentrant
    # The norm and the number of parameters count a tied weight once, on its first stage.
    ctx.stash[COUNTED_ELSEWHERE] = {
        *(ctx.stash.get(COUNTED_ELSEWHERE) or ()),
        *copies_elsewhere(model),
    }
    return model


@dataclass(slots=True)
class _PipeBuffer:
    """A pipeline buffer: what is kept of one micro-batch in one chunk, from load to backward."""

    # -- Forward.

    # The inputs, from the loader or another stage; released once forward has run.
    inputs: Any = None
    # Inputs from another stage whose gradients are sent back, as autograd leaves.
    leaves: list[Tensor] = field(default_factory=list)
    # The labels; only in the last part of the model.
    labels: Any = None
    # What the chunk returned, until it is sent or backward begins; the loss in the last part.
    outputs: list[Tensor] = field(default_factory=list)
    # Whether the chunk returned a tuple: the next stage is called with one too.
    is_tuple: bool = False
    # How the outputs were sent.
    meta: Meta | None = None

    # -- Backward.

    # The received gradients of those outputs that have one.
    root_grads: list[Tensor] = field(default_factory=list)
    # The gradients to send.
    input_grads: list[Tensor] = field(default_factory=list)
    # What is left of a backward that was cut in two.
    later: WeightBackward | None = None
    # Outputs and their gradients, of a backward that runs as a whole in the second half.
    deferred: tuple[list[Tensor], list[Tensor]] | None = None


class PipelineRunner(Runner):
    """See `ds_core.engine.Runner`. Created on all ranks together."""

    manual = False
    manual_reason = BY_HAND

    additional_losses: dict[str, float]
    """On the last stage, means of `get_additional_losses` over the last batch."""

    def __init__(self, ctx: Context) -> None:
        assert isinstance(ctx.module, PipelineModule)
        self.ctx = ctx
        self.module = ctx.module
        self.section = _section(ctx)

        # -- The place of this stage.

        self.stages = self.module.num_stages
        self.stage = self.module.stage_id
        # The chunks of this stage, and the parts of the whole model: see `_part`.
        self.chunks = self.module.chunks
        self.parts = self.stages * self.chunks
        self.makes_loss = self._has_last
        self.additional_losses = {}

        # -- What carries out a batch.

        split = (
            self.section.pipe_partitioned,
            self.section.pipe_partitioned and self.section.grad_partitioned,
        )
        self._plans = StagePlans(
            self.section.schedule, ctx.plugins, self.stages, self.stage, self.chunks
        )
        self.transport = StageTransport(ctx, self.stages, self.stage, self.chunks, split)
        self.ties = Ties(ctx, self.module)
        if ctx.accelerator.device_type == "cpu":
            tune_malloc()
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
            # The engine makes the step, once `train` has returned.
            s.OptimizerStep: lambda what: None,
        }

        # -- The state between batches.

        # Whether an earlier batch ended in its middle: messages of it may be under way.
        self._failed = False
        # Shapes of the last batch's inputs, by whether it was trained on; None: they differed.
        self._signatures: dict[bool, Any] = {}
        # Whether partitioned gradients stay with their rank until the batch is over.
        self._keep_local = False

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
        """Run one batch on this stage."""
        plan = self._plans.get(self._count, train=self._train)
        self._begin(return_logits)
        self._micros, headers, signature = self._pull(batches)

        # From here on messages are under way: until all is done, the batch counts as failed.
        self._failed = True
        if self._train:
            self.ties.begin()
        self.transport.begin(
            [self._incoming(what) for what in plan.commands if isinstance(what, RECEIVES)],
            train=self._train,
            headers=headers,
            most=plan.in_flight,
        )
        for what in plan.commands:
            self._handler(what)(what)
        self.transport.finish()
        self._failed = False

        # The next batch needs no headers if its inputs have the same shapes.
        self._signatures[self._train] = signature
        self.module.shapes_known = True
        self._buffers.clear()
        self._micros = []
        self.additional_losses = {k: v / self._count for k, v in self._extra.items()}

    def _begin(self, keep_logits: bool) -> None:
        """Clear what a batch collects."""
        # By chunk and buffer of the schedule.
        self._buffers: dict[tuple[int, int], _PipeBuffer] = {}
        # Micro-batches that each chunk has loaded.
        self._loaded = dict.fromkeys(range(self.chunks), 0)
        # The sum over micro-batches, and the sums of additional losses.
        self._loss: Tensor | None = None
        self._extra: dict[str, float] = {}
        # The model's outputs, if they are kept.
        self._keep = keep_logits
        self._logits: list[Any] = []

    def _handler(self, what: s.PipeInstruction) -> Any:
        """What carries out an instruction, or one of its base classes."""
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
                "be under way; start the processes again, from a checkpoint"
            )
        # A rank that raised by itself would leave the others waiting for its messages: all ranks
        # agree on what happened first.
        micros: list[tuple[Any, Any]] = []
        short = False
        trouble = None
        try:
            micros = self._read_micro_batches(batches)
        except StopIteration:
            short = True
        except Exception as error:
            trouble = error
        first = self.stage == 0
        shapes = [signature(inputs) for inputs, _ in micros] if first else []
        mixed = self.module.dynamic_shape or any(x != shapes[0] for x in shapes)
        last_shapes = self._signatures.get(self._train)
        known = self.module.shapes_known and last_shapes == (shapes[0] if shapes else None)
        thawed = self._train and self.ties.changed
        request = BatchRequest(self._count, self._train, self._with_loss)
        any_short, any_mixed, any_new, any_trouble, any_thawed = agree(
            self.ctx, request, [short, mixed, not known and first, trouble is not None, thawed]
        )
        if trouble is not None:
            raise trouble
        if any_trouble:
            why = "lost this batch: a peer failed while it read its micro-batches; see its error"
            raise UsageError(why)
        if any_short:
            raise StopIteration
        if any_thawed:
            self.ties.agree()
        if any_mixed:
            return micros, "each", None
        return micros, "first" if any_new else "none", shapes[0] if shapes else None

    def _read_micro_batches(self, batches: Iterator[Any]) -> list[tuple[Any, Any]]:
        """Inputs and labels, on the first and the last stage; others use neither."""
        if self.stage > 0 and not self._has_last:
            return []
        needs_labels = self._with_loss and self.module.has_loss
        micros = take_micro_batches(batches, self._count, self.module.batch_fn, needs_labels)
        if (cut := self.module.cut_batch) is not None:
            micros = [cut(*pair) for pair in micros]
        return micros

    def _shared_loss(self) -> Tensor | None:
        """The last stage's mean loss, on every stage."""
        device = self.ctx.accelerator.current_device()
        # Other stages do not know its dtype, so that is sent too.
        loss = torch.zeros(2, dtype=torch.float64, device=device)
        if self._has_last:
            assert self._loss is not None
            loss[0] = self._loss.double() / self._count
            loss[1] = float(DTYPES.index(self._loss.dtype))
        if self.stages > 1:
            mesh = self.ctx.mesh
            comm.label("loss")
            comm.broadcast(loss, src=mesh.ranks("pp")[-1], group=mesh.group("pp"))
        return loss[0].to(DTYPES[int(loss[1].item())])

    # -- instructions ------------------------------------------------------------------------------

    def _incoming(self, what: s.BufferOpInstruction) -> Incoming:
        return Incoming("act" if isinstance(what, s.RecvActivation) else "grad", self._part(what))

    def _part(self, what: s.BufferOpInstruction) -> int:
        """The part of the model that an instruction is about: chunks go round the stages."""
        return what.chunk * self.stages + self.stage

    def _buffer(self, what: s.BufferOpInstruction) -> _PipeBuffer:
        return self._buffers.setdefault((what.chunk, what.buffer_id), _PipeBuffer())

    def _load(self, what: s.BufferOpInstruction) -> None:
        # The buffer's number says nothing of the micro-batch: buffers are used in turn.
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
        # Labels may have been loaded into it before.
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
        # Autograd refuses to change a leaf in place, as a first layer like nn.ReLU(inplace=True) does.
        if buffer.leaves and self.module.changes_inputs(what.chunk):
            inputs = (
                inputs.clone() if isinstance(inputs, Tensor) else tuple(t.clone() for t in inputs)
            )
        context = forward_context(self.ctx.precision, self.ctx.accelerator)
        given: Any = ((inputs,), {}) if self._part(what) == 0 else None
        with self._engine.telemetry.phase("forward", given), context or contextlib.nullcontext():
            self._compute(buffer, inputs, what.chunk, last)

    def _compute(self, buffer: _PipeBuffer, inputs: Any, chunk: int, last: bool) -> None:
        """Run a chunk; last: of the model, so it ends in the loss."""
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
        self._add_loss(loss.detach())
        if self._train:
            check_loss(loss)
            factor = self._engine.loss_factor(self._count)
            buffer.outputs = [loss * factor if factor != 1.0 else loss]

    def _add_loss(self, loss: Tensor) -> None:
        self._loss = loss if self._loss is None else self._loss + loss
        for name, value in (self.module.get_additional_losses() or {}).items():
            self._extra[name] = self._extra.get(name, 0.0) + float(value)

    def _send_activation(self, what: s.BufferOpInstruction) -> None:
        buffer = self._buffer(what)
        buffer.meta = self.transport.send_activation(
            self._part(what) + 1, buffer.outputs, buffer.is_tuple
        )
        # No backward will need them.
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
        # The loss of the last part has no received gradient.
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
        """The first half of a backward: the gradients that another stage waits for."""
        buffer = self._buffer(what)
        roots, grads = self._take_roots(buffer)
        # Nobody waits for the gradients of the model's own inputs: all is left to the second half.
        if not buffer.leaves:
            buffer.deferred = (roots, grads)
            return
        # A graph that cannot be cut does all in this half.
        if not self._can_cut(roots):
            self._run_backward(roots, grads)
            self._collect(buffer)
            return

        def backward() -> None:
            buffer.later = backward_inputs(roots, grads, buffer.leaves)

        self._engine.run_backward(backward, keep_local=self._keep_local)
        self._collect(buffer)

    def _can_cut(self, roots: Sequence[Tensor]) -> bool:
        """Whether backward can be split.

        Not with activation checkpointing, nor where weights are released after forward.
        """
        if self.module.activation_checkpoint_interval or self._engine.partitioner.releases_weights:
            return False
        return bool(roots) and all(t.grad_fn is not None for t in roots)

    def _backward_weight(self, what: s.BufferOpInstruction) -> None:
        """The second half: the gradients of weights, while this stage would be idle."""
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
