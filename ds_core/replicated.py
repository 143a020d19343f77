"""`Replicated`: data parallelism, where every rank holds all states of what it shares with others.

[Note: one reduction per boundary] Micro-batches accumulate into ``param.grad``. While `sync` is on, a gradient that
is ready goes into its bucket, and a full bucket is reduced while backward goes on; `finish` waits. Buckets are
reduced in one fixed order on all ranks. A second backward at the same boundary needs no special case: what is
already averaged is the same on all ranks, so averaging it again together with the new local part changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ds_core.buckets import Bucket, GradState, make_buckets
from ds_core.errors import UsageError
from ds_core.gradients import GradientShard
from ds_core.param_shard import ParamShard
from ds_core.params import GradGroup
from ds_core.partition import (
    ParamGroups,
    Partitioner,
    StateSource,
    StateTensor,
    broadcast_from_first,
    buffer_states,
    read_state,
    saved_optimizer_states,
    set_optimizer_state,
)
from ds_core.stepping import Stepper

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from ds_core.context import Context
    from ds_core.params import ParamInfo

__all__ = ["Replicated"]


@dataclass(slots=True)
class _Slot:
    """A trainable parameter, what the optimizer updates for it, and where its gradient accumulates.

    master: the parameter itself when no other dtype is wanted. total: the accumulator when gradients accumulate
    in another dtype than the parameter's, else None (then ``param.grad`` accumulates). alone: the parameter is on this
    rank only, though dp has others.
    """

    name: str
    param: nn.Parameter
    master: nn.Parameter
    held: tuple[str, ...]
    alone: bool = False
    total: Tensor | None = None

    @property
    def copy(self) -> Tensor | None:
        """Where the master's new value is written in the parameter's dtype."""
        return None if self.master is self.param else self.param


class Replicated(Partitioner):
    """Every rank holds everything; gradients are averaged over each parameter's replicas in overlapped buckets."""

    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx
        self._slots: list[_Slot] = []
        self._by_param: dict[nn.Parameter, _Slot] = {}
        self._shares = False  # some parameter has replicas
        self._buckets: list[Bucket] | None = None  # None: to be made before the next reduction
        self._bucket_of: dict[nn.Parameter, Bucket] = {}
        self._next = 0  # the bucket that is reduced next
        self._twice = False  # a gradient has arrived in parts, so nothing is reduced before backward ends
        self.grad_state = GradState.LOCAL
        self._load_hook: Any = None
        self._module: nn.Module | None = None
        self._plain = True  # the optimizer updates the module's own parameters
        self.given: list[Tensor | None] = []  # per master, from `gradients` to the step
        self._stepper = Stepper([], [])

    @property
    def averages(self) -> bool:
        """Whether gradients are averaged over replicas; if not, each rank keeps its own."""
        return True

    def masters(self) -> Iterator[tuple[ParamInfo, nn.Parameter]]:
        """Each trainable parameter's place on the mesh, and what the optimizer updates for it; ordered as `given`."""
        return ((self.ctx.params[slot.param], slot.master) for slot in self._slots)

    # -- set-up ----------------------------------------------------------------------------------------------

    def attach(self, module: nn.Module, groups: ParamGroups) -> ParamGroups:
        """See `Partitioner.attach`."""
        self._module = module
        self._broadcast(module)
        out = []
        for group in groups:
            slots = [self._slot(p) for p in group["params"]]
            self._slots += slots
            out.append({**group, "params": [s.master for s in slots]})
        self._by_param = {s.param: s for s in self._slots}
        self._plain = all(s.master is s.param for s in self._slots)
        self._stepper = Stepper([s.master for s in self._slots], [s.copy for s in self._slots])
        self._shares = any(self._replicas(s) for s in self._slots)
        self.takes_gradients = self._shares or any(self._accumulates(s) for s in self._slots)
        if not self._plain:
            self._load_hook = module.register_load_state_dict_post_hook(lambda *_: self._masters_from_weights())
        return out

    @torch.no_grad()
    def _masters_from_weights(self) -> None:
        """After a load_state_dict of the user's; the next step would publish the old weights otherwise."""
        for slot in self._slots:
            if slot.master is not slot.param:
                slot.master.copy_(slot.param)

    def _slot(self, param: nn.Parameter) -> _Slot:
        info = self.ctx.params.get(param)
        if info is None:
            raise UsageError(
                f"model_parameters holds a tensor of shape {tuple(param.shape)} that is not a parameter of the model; "
                "pass parameters of the model given to initialize (after any transform they must still be in it)"
            )
        master_dtype = self.ctx.precision.master
        master = param
        if master_dtype is not None and param.is_floating_point() and param.dtype != master_dtype:
            master = nn.Parameter(param.detach().to(master_dtype, copy=True), requires_grad=param.requires_grad)
        alone = self.ctx.mesh.size("dp") > 1 and not info.replicas
        return _Slot(info.name, param, master, info.held, alone)

    def _accumulates(self, slot: _Slot) -> bool:
        wanted = self.ctx.precision.accumulate
        return wanted is not None and slot.param.is_floating_point() and wanted != slot.param.dtype

    def _replicas(self, slot: _Slot) -> tuple[str, ...]:
        return self.ctx.params[slot.param].replicas

    def _broadcast(self, module: nn.Module) -> None:
        """Give every rank the weights and buffers of the first of its replicas."""
        mesh = self.ctx.mesh
        if mesh.size("dp") == 1:
            return
        tensors = [(self.ctx.params[p].replicas, p.data) for p in module.parameters()]
        tensors += [(self.ctx.buffers[n].replicas, b.data) for n, b in module.named_buffers()]
        broadcast_from_first(mesh, tensors)

    # -- backward --------------------------------------------------------------------------------------------

    @property
    def _reduces(self) -> bool:
        """Whether the running backward is to reduce gradients."""
        return self.sync and self._shares and self.averages

    def begin(self, changed: bool) -> None:
        """See `Partitioner.begin`."""
        if changed:
            self._buckets = None
        self.grad_state = GradState.LOCAL
        if self._reduces:
            self._start()

    def on_gradient(self, param: nn.Parameter) -> None:
        """See `Partitioner.on_gradient`."""
        slot = self._by_param[param]
        if self._accumulates(slot):
            assert param.grad is not None
            if slot.total is None:
                slot.total = torch.zeros_like(param, dtype=self.ctx.precision.accumulate)
            self.ctx.kernels.accumulate(slot.total, param.grad)
            param.grad = None
        if self.grad_state is not GradState.RUNNING:
            return
        assert self._buckets is not None
        if (bucket := self._bucket_of.get(param)) is not None:
            # [Note: gradients that arrive twice] Re-entrant recomputation runs a backward inside the backward, so a
            # shared weight's hook fires for each. A bucket on its way has then missed a part: all are sent again at
            # the end, and from now on none is sent earlier (every rank runs the same program, so all decide alike).
            self._twice |= param in bucket.arrived
            bucket.arrived.add(param)
        while not self._twice and self._next < len(self._buckets) and self._buckets[self._next].complete:
            self._launch(self._buckets[self._next])
            self._next += 1

    def _start(self) -> None:
        """Prepare the buckets for one backward."""
        self.grad_state = GradState.RUNNING
        if self._buckets is None:
            self._buckets = make_buckets([s.param for s in self._slots if s.param.requires_grad], self.ctx)
            self._bucket_of = {p: b for b in self._buckets for p in b.params}
        self._next = 0
        for bucket in self._buckets:
            bucket.settle()

    def _gradient(self, param: nn.Parameter) -> Tensor | None:
        total = self._by_param[param].total
        return param.grad if total is None else total

    def _launch(self, bucket: Bucket) -> None:
        bucket.launch([self._gradient(p) for p in bucket.params])

    def finish(self) -> None:
        """See `Partitioner.finish`."""
        if not self._reduces or self.grad_state is GradState.REDUCED:
            return
        if self.grad_state is GradState.LOCAL:
            self._start()
        assert self._buckets is not None
        if self._twice and self._next:
            for bucket in self._buckets:
                bucket.settle()
            self._next = 0
        for bucket in self._buckets[self._next :]:
            self._launch(bucket)
        self.grad_state = GradState.REDUCED
        for bucket in self._buckets:
            for param, reduced in bucket.collect():
                slot = self._by_param[param]
                if slot.total is not None:
                    slot.total.copy_(reduced)
                elif reduced.dtype == param.dtype:
                    param.grad = reduced
                elif param.grad is not None:
                    param.grad.copy_(reduced)
                else:
                    param.grad = reduced.to(param.dtype)

    # -- step ------------------------------------------------------------------------------------------------

    def gradients(self) -> Sequence[GradGroup]:
        """See `Partitioner.gradients`."""
        by_axes: dict[tuple[str, ...], list[Tensor]] = {}
        self.given = []
        for slot in self._slots:
            grad = slot.param.grad if slot.total is None else slot.total
            if grad is not None:
                if slot.total is not None and slot.master is slot.param:
                    grad = slot.param.grad = grad.to(slot.param.dtype)
                elif grad.is_sparse:  # of nn.Embedding(sparse=True); what follows is for dense ones
                    grad = slot.param.grad = grad.to_dense()
                if slot.alone:
                    # Nothing to reduce, but the average is over all of dp. Not before the step: a later backward adds.
                    grad = self.weighted(slot.master, grad, 1.0 / self.ctx.mesh.size("dp"))
                if self.ctx.params[slot.param].counted:
                    by_axes.setdefault(slot.held, []).append(grad)
            self.given.append(grad)
        return [GradGroup(axes, tensors) for axes, tensors in by_axes.items()] or [GradGroup((), [])]

    def gradient_shards(self) -> Iterable[GradientShard]:
        """See `Partitioner.gradient_shards`: every gradient is unsharded."""
        for slot, grad in zip(self._slots, self.given, strict=True):
            if grad is not None:
                shape, counted = tuple(slot.param.shape), self.ctx.params[slot.param].counted
                yield GradientShard(slot.name, grad, shape, 0, grad.numel(), slot.held, slot.held, counted)

    def weighted(self, master: Tensor, grad: Tensor, weight: float) -> Tensor:
        """The gradient times `weight`: a new tensor where 16 bits would round the product."""
        return grad.mul_(weight) if grad.dtype == master.dtype else grad.to(master.dtype).mul_(weight)

    def step(self, optimizer: Optimizer, factor: float) -> None:
        """See `Partitioner.step`."""
        self._stepper.step(optimizer, None if self._plain else self.given, factor)

    def zero_grad(self) -> None:
        """See `Partitioner.zero_grad`."""
        if self.grad_state is GradState.RUNNING:  # a backward failed half-way
            for bucket in self._buckets or ():
                bucket.settle()
        self.grad_state = GradState.LOCAL
        self.given = []
        for slot in self._slots:
            slot.param.grad = None
        if not self._plain or self.ctx.precision.accumulate is not None:
            for slot in self._slots:
                slot.master.grad = None
                slot.total = None

    def axes(self) -> Iterable[tuple[str, ...]]:
        """See `Partitioner.axes`."""
        return {s.held for s in self._slots} | {()}

    # -- checkpoints -----------------------------------------------------------------------------------------

    def states(self, optimizer: Optimizer | None) -> Iterable[StateTensor]:
        """See `Partitioner.states`; replicas share the writing, but buffers may differ: the first rank's count."""
        assert self._module is not None
        mesh = self.ctx.mesh
        for name, tensor, info in self._tensors(optimizer):
            copies = tuple(a for a in mesh.expand(mesh.names) if a not in info.held)
            yield StateTensor(name, tensor, tuple(tensor.shape), 0, tensor.numel(), info.held, info.counted, copies)
        yield from buffer_states(self.ctx, self._module)

    def _tensors(self, optimizer: Optimizer | None) -> Iterable[tuple[str, Tensor, ParamInfo]]:
        assert self._module is not None
        for name, param in self._module.named_parameters():
            yield f"module/{name}", param.data, self.ctx.params[param]
        for slot in self._slots:
            info = self.ctx.params[slot.param]
            if slot.master is not slot.param:
                yield f"master/{slot.name}", slot.master.data, info
            for key, value in optimizer.state.get(slot.master, {}).items() if optimizer is not None else ():
                if isinstance(value, Tensor):
                    yield f"optimizer/{key}/{slot.name}", value, info

    @torch.no_grad()
    def load_states(self, source: StateSource, optimizer: Optimizer | None, *, strict: bool = True) -> None:
        """See `Partitioner.load_states`."""
        known = set(source.names())
        for state in self.states(None):
            if state.name.startswith("module/") and (strict or state.name in known):
                state.tensor.copy_(_read(source, state.name, state.tensor))
        for slot in self._slots:
            if slot.master is not slot.param:
                name = f"master/{slot.name}"
                slot.master.data.copy_(_read(source, name, slot.master) if name in known else slot.param.data)
        if optimizer is not None:
            saved = saved_optimizer_states(source)
            for slot in self._slots:
                names = saved.get(slot.name, {})
                old = optimizer.state.get(slot.master, {})
                values = {k: read_state(source, name, old.get(k)) for k, name in names.items()}
                set_optimizer_state(optimizer, slot.master, values)

    def locate(self, param: nn.Parameter) -> ParamShard | None:
        """See `Partitioner.locate`."""
        slot = self._by_param.get(param)
        return None if slot is None else _Copy(self, slot)

    def detach(self) -> None:
        """See `Partitioner.detach`."""
        if self._load_hook is not None:
            self._load_hook.remove()
        self._stepper.release()
        for slot in self._slots:
            slot.total = None
        self._buckets, self._bucket_of, self._shares = None, {}, False


class _Copy(ParamShard):
    """A parameter of `Replicated`: every rank holds all of it."""

    partitions_weights = local = False

    def __init__(self, owner: Replicated, slot: _Slot) -> None:
        mesh, axes = owner.ctx.mesh, owner._replicas(slot)
        self._owner, self._slot = owner, slot
        self.name, self.shape, self.param, self.updated = slot.name, tuple(slot.param.shape), slot.param, slot.master
        self.group, self.ranks, self.index = mesh.group(*axes), mesh.ranks(*axes), mesh.index(*axes)
        self.ranges = self.updated_ranges = [(0, slot.param.numel())] * len(self.ranks)
        self.device = slot.param.device
        self._lone = len(self.ranks) == 1

    def round(self) -> None:
        """See `ParamShard.round`."""
        if self.updated is not self.param:
            self.param.copy_(self.updated)

    def set_weight(self, master: Tensor) -> None:
        """See `ParamShard.set_weight`."""
        self.param.copy_(master)

    @property
    def window_open(self) -> bool:
        """See `ParamShard.window_open`."""
        return any(self._owner._gradient(s.param) is not None for s in self._owner._slots)

    @property
    def grad_dtype(self) -> torch.dtype:
        """See `ParamShard.grad_dtype`."""
        accumulate = self._owner.ctx.precision.accumulate
        return accumulate if accumulate is not None and self.param.is_floating_point() else self.param.dtype

    @property
    def _factor(self) -> float:
        """What the step will still multiply what this rank holds by, in effect: reduction sums over ranks, then
        divides by all of dp. What is averaged already is the same on all of them."""
        reduced = self._owner.grad_state is GradState.REDUCED and not self._lone
        return 1.0 if reduced else len(self.ranks) / self._owner.ctx.mesh.size("dp")

    def _held(self) -> Tensor | None:
        grad = self._owner._gradient(self.param)
        return None if grad is None else (grad.to_dense() if grad.is_sparse else grad).detach().reshape(-1)

    def reduced(self) -> Tensor | None:
        """See `ParamShard.reduced`."""
        grad = None if self.has_pending else self._held()
        return grad if grad is None or self._factor == 1.0 else grad * self._factor

    @property
    def has_pending(self) -> bool:
        """See `ParamShard.has_pending`."""
        final = self._lone or self._owner.grad_state is GradState.REDUCED
        return not final and self._owner._gradient(self.param) is not None

    def pending(self) -> Tensor | None:
        """See `ParamShard.pending`."""
        grad = self._held() if self.has_pending else None
        return None if grad is None else grad / self._owner.ctx.mesh.size("dp")

    def set_grad(self, values: Tensor) -> None:
        """See `ParamShard.set_grad`."""
        values = (values / self._factor).view(self.shape)
        total = self._slot.total
        if self.grad_dtype != self.param.dtype:
            total = self._slot.total = torch.empty_like(self.param, dtype=self.grad_dtype) if total is None else total
            total.copy_(values)
            return
        if self.param.grad is None or self.param.grad.is_sparse:
            self.param.grad = torch.empty_like(self.param)
        self.param.grad.copy_(values)


def _read(source: StateSource, name: str, like: Tensor) -> Tensor:
    shape = source.shape(name)
    if tuple(like.shape) != shape:
        raise UsageError(
            f"checkpoint state {name!r} has shape {shape}, the model's is {tuple(like.shape)}; was it saved "
            "by another model?"
        )
    return read_state(source, name, like)
