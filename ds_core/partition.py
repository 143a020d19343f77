"""Who owns model states: the Partitioner contract, and `Replicated`, real data parallelism.

[Note: one reduction per boundary] Micro-batches accumulate into ``param.grad``. While `sync` is on, a gradient that
is ready goes into its bucket, and a full bucket is reduced while backward goes on; `finish` waits. Buckets are
reduced in one fixed order on all ranks. A second backward at the same boundary needs no special case: what is
already averaged is the same on all ranks, so averaging it again together with the new local part changes nothing.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from ds_core import comm
from ds_core.buckets import Bucket, make_buckets
from ds_core.errors import UsageError
from ds_core.holding import Holding
from ds_core.params import GradGroup
from ds_core.process import STATE

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from ds_core.context import Context
    from ds_core.mesh import Mesh

__all__ = [
    "Partitioner",
    "Replicated",
    "StateSource",
    "StateTensor",
    "broadcast_from_first",
    "saved_optimizer_states",
    "set_optimizer_state",
]

log = logging.getLogger("ds_core.partition")

ParamGroups = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class StateTensor:
    """This rank's piece of one model state, for checkpoints.

    name: ``"module/<param>"``, ``"master/<param>"`` or ``"optimizer/<key>/<param>"``. tensor: the live piece.
    shape: of the whole state. start, stop: the piece as a range of the row-major flattened state.
    held: axes on which ranks hold different states under this name. store: whether this rank writes it, or a share of
    it: copies are the axes along which ranks hold this very piece, with `store` on all of them.
    read: gives the values of `tensor`, or of a view of it, where it may be empty: where it rests in a `StateStore` that
    gives memory back.
    """

    name: str
    tensor: Tensor
    shape: tuple[int, ...]
    start: int
    stop: int
    held: tuple[str, ...]
    store: bool
    copies: tuple[str, ...] = ()
    read: Callable[[Tensor], Tensor] | None = None

    def values(self) -> Tensor:
        """The values of `tensor`, wherever they rest."""
        return self.tensor if self.read is None else self.read(self.tensor)


class StateSource(Protocol):
    """States in a checkpoint, by the names of `StateTensor`."""

    def names(self) -> Sequence[str]:
        """Every state that this rank may read."""

    def shape(self, name: str) -> tuple[int, ...]:
        """The whole state's shape."""

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """The range [start, stop) of the row-major flattened state, as a new 1-d CPU tensor."""


def origin_matters(ctx: Context) -> bool:
    """Whether gradients from ``engine.backward`` differ from those of ``loss.backward()`` or another engine's."""
    return ctx.batch.gas > 1 or ctx.precision.scales_loss or sum(r() is not None for r in STATE.attached.values()) > 1


class Partitioner(ABC):
    """Owns how parameters, gradients and optimizer states lie over the ranks that would hold the same ones.

    The engine calls, in order: `attach` once; per micro-batch sets `sync` and runs backward; `finish` after the
    boundary's backward; then `gradients`, `scale`, `step`, `publish`, `zero_grad`.
    """

    partitions_gradients = False
    """True when gradients are spread over ranks during backward, which rules out `no_sync`."""

    sync = True
    """Whether the backward that comes next may reduce gradients as they become ready."""

    methods: Mapping[str, Callable[..., Any]] = {}
    """What its engine offers beyond `Engine`, by name: functions whose first argument is the engine."""

    hold = False
    """True where gradients must stay with this rank for now, even if they are partitioned (`sync` is off then)."""

    strayed = False
    """Whether gradients came from a plain ``loss.backward()`` in this accumulation window."""

    joined: float | None = None
    """What other engines' ``backward`` multiplied the losses by whose gradients came in this accumulation window (a
    joint loss); None: no such came; nan: not always the same."""

    @abstractmethod
    def attach(self, module: nn.Module, groups: ParamGroups) -> ParamGroups:
        """Take over `module`, whose weights are cast and on their device, and make ranks agree on them.

        groups: optimizer parameter groups over the module's parameters. Returns the same groups with the tensors
        that the optimizer is to update in the place of the parameters. Collective.
        """

    def adopt(self, param: nn.Parameter, state: Mapping[str, Any]) -> dict[str, Any]:
        """This rank's part of the `state` that a user's optimizer already had for `param` when it was attached.

        It becomes the state of what the optimizer updates in its place; empty: none.
        """
        return dict(state)

    def note_other_driver(self) -> None:
        """For hooks on gradients: one has come while `STATE.driver` is not this partitioner.

        The engine multiplies a loss before backward, and what came otherwise in the step; so where `origin_matters`, a
        partitioner's hooks must say what came otherwise.
        """
        self.note_origin()
        if STATE.joint is not None:
            STATE.joint.touch(self)

    def note_origin(self) -> None:
        """Gradients come from a backward that this partitioner's engine did not begin."""
        if STATE.driver is None:
            self.strayed = True
        elif self.joined != STATE.factor:
            self.joined = STATE.factor if self.joined is None else math.nan

    def finish_later(self) -> None:
        """Have `finish` called when the running backward ends, which nobody else will do."""
        if STATE.joint is None:
            torch.autograd.Variable._execution_engine.queue_callback(self.finish)
        else:
            STATE.joint.touch(self)

    def rewatch(self) -> None:  # noqa: B027
        """What `origin_matters` says may have changed."""

    def begin(self) -> None:  # noqa: B027
        """The engine starts a backward and will call `finish` after it. Not called for a plain ``loss.backward()``."""

    @abstractmethod
    def finish(self) -> None:
        """Complete the reduction of all gradients; does nothing when `sync` is off or none is due. Collective."""

    @abstractmethod
    def gradients(self) -> Sequence[GradGroup]:
        """The reduced gradients as the optimizer will see them (in its dtype), once per step, after `finish`."""

    @abstractmethod
    def scale(self, factor: float) -> None:
        """Multiply what `gradients` gave by `factor`, in place."""

    def step(self, optimizer: Optimizer) -> None:
        """Let `optimizer` update its tensors from their gradients; in several steps where not all are in memory."""
        optimizer.step()

    @abstractmethod
    def publish(self) -> None:
        """Make the module's weights those that the optimizer has just written. May be collective."""

    @abstractmethod
    def zero_grad(self) -> None:
        """Drop all gradients."""

    @abstractmethod
    def axes(self) -> Iterable[tuple[str, ...]]:
        """Every set of axes that a `GradGroup` of this rank can carry."""

    @abstractmethod
    def states(self, optimizer: Optimizer | None) -> Iterable[StateTensor]:
        """This rank's model states; those of `optimizer` too when given."""

    @abstractmethod
    def load_states(self, source: StateSource, optimizer: Optimizer | None, *, strict: bool = True) -> None:
        """Read this rank's model states; those of `optimizer` too when given.

        strict: a weight that the checkpoint lacks is an error. Without master weights in the checkpoint they are
        made from the module's.
        """

    def locate(self, param: nn.Parameter) -> Holding | None:
        """What this rank holds of the states of `param`; None when no optimizer updates it here."""
        return None

    def detach(self) -> None:  # noqa: B027
        """Remove hooks and free buffers; the module keeps its weights."""


@dataclass(slots=True)
class _Slot:
    """A trainable parameter, what the optimizer updates for it, and where its gradient accumulates.

    master: the parameter itself when no other dtype is wanted. total: the accumulator when gradients accumulate
    in another dtype than the parameter's, else None (then ``param.grad`` accumulates).
    """

    name: str
    param: nn.Parameter
    master: nn.Parameter
    held: tuple[str, ...]
    total: Tensor | None = None
    master_grad: Tensor | None = None


class Replicated(Partitioner):
    """Every rank holds everything; gradients are averaged over each parameter's replicas in overlapped buckets."""

    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx
        self._slots: list[_Slot] = []
        self._by_param: dict[nn.Parameter, _Slot] = {}
        self._buckets: list[Bucket] | None = None
        self._place: dict[nn.Parameter, Bucket] = {}
        self._next = 0
        self._running = False  # a backward that reduces is under way, and somebody will call `finish`
        self._twice = False  # a gradient has arrived in parts, so nothing is reduced before backward ends
        self._reduced = False  # all gradients are reduced
        self._trainable: list[bool] = []
        self._hooks: list[Any] = []
        self._refresh: Any = None
        self._module: nn.Module | None = None
        self._alone: list[_Slot] = []  # on this rank only, though dp has others
        self._plain = True  # the optimizer updates the module's own parameters

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
        if not any(self._replicas(s) for s in self._slots):
            self._buckets = []
        if self.ctx.mesh.size("dp") > 1:
            self._alone = [s for s in self._slots if not self._replicas(s)]
        self._install_hooks()
        if not self._plain:
            self._refresh = module.register_load_state_dict_post_hook(lambda *_: self._masters_from_weights())
        return out

    @torch.no_grad()
    def _masters_from_weights(self) -> None:
        """After a load_state_dict of the user's; the next step would publish the old weights otherwise."""
        for slot in self._slots:
            if slot.master is not slot.param:
                slot.master.copy_(slot.param)

    def _install_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._trainable = [s.param.requires_grad for s in self._slots]
        watched = origin_matters(self.ctx)
        self._hooks = [
            s.param.register_post_accumulate_grad_hook(self._on_gradient)
            for s in self._slots
            if s.param.requires_grad and (self._buckets != [] or watched or self._accumulates(s))
        ]

    def rewatch(self) -> None:
        """See `Partitioner.rewatch`; with one rank, hooks are there only for what needs them."""
        if self._hooks or self._module is not None:
            self._install_hooks()

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
        return _Slot(info.name, param, master, info.held)

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
        everywhere = mesh.replicas(())
        tensors = [(self.ctx.params[p].replicas, p.data) for p in module.parameters()]
        tensors += [(everywhere, b.data) for b in module.buffers()]
        broadcast_from_first(mesh, tensors)

    # -- backward --------------------------------------------------------------------------------------------

    def _on_gradient(self, param: Tensor) -> None:
        """Runs inside backward each time the gradient of `param` is complete for this backward."""
        if STATE.driver is not self:
            self.note_other_driver()
        slot = self._by_param[param]  # type: ignore[index]
        if self._accumulates(slot):
            assert param.grad is not None
            if slot.total is None:
                slot.total = torch.zeros_like(param, dtype=self.ctx.precision.accumulate)
            slot.total += param.grad
            param.grad = None
        self._reduced = False
        if not self.sync or self._buckets == []:
            return
        if not self._running:
            # A plain loss.backward(): gradients shall be final after it, too.
            self._start()
            self.finish_later()
        assert self._buckets is not None
        if (bucket := self._place.get(param)) is not None:  # type: ignore[call-overload]
            # [Note: gradients that arrive twice] Re-entrant recomputation runs a backward inside the backward, so a
            # shared weight's hook fires for each. A bucket on its way has then missed a part: all are sent again at
            # the end, and from now on none is sent earlier (every rank runs the same program, so all decide alike).
            self._twice |= param in bucket.arrived
            bucket.arrived.add(param)
        while not self._twice and self._next < len(self._buckets) and self._buckets[self._next].complete:
            self._launch(self._buckets[self._next])
            self._next += 1

    def begin(self) -> None:
        """See `Partitioner.begin`."""
        self._reduced = False
        if self.sync and self._buckets != []:
            self._start()

    def _start(self) -> None:
        """Prepare the buckets for one backward; parameters may have been frozen or unfrozen since the last."""
        self._running = True
        if self._buckets is None or self._trainable != [s.param.requires_grad for s in self._slots]:
            self._install_hooks()
            self._buckets = make_buckets([s.param for s in self._slots if s.param.requires_grad], self.ctx)
            self._place = {p: b for b in self._buckets for p in b.params}
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
        if not self.sync or self._buckets == [] or self._reduced:
            return
        if not self._running:
            self._start()
        assert self._buckets is not None
        if self._twice and self._next:
            for bucket in self._buckets:
                bucket.settle()
            self._next = 0
        for bucket in self._buckets[self._next :]:
            self._launch(bucket)
        self._running = False
        self._reduced = True
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
        if not self._plain or self.ctx.precision.accumulate is not None:
            self._cast_gradients()
        if self._alone:
            # Nothing to reduce, but the average is over all of dp. Not before the step: a later backward adds to it.
            lone = [s.master.grad for s in self._alone if s.master.grad is not None]
            if lone:
                torch._foreach_mul_(lone, 1.0 / self.ctx.mesh.size("dp"))
        by_axes: dict[tuple[str, ...], list[Tensor]] = {}
        for slot in self._slots:
            if (grad := slot.master.grad) is not None:
                if grad.is_sparse:  # of nn.Embedding(sparse=True); what follows is for dense ones
                    grad = slot.master.grad = grad.to_dense()
                by_axes.setdefault(slot.held, []).append(grad)
        return [GradGroup(axes, tensors) for axes, tensors in by_axes.items()] or [GradGroup((), [])]

    def _cast_gradients(self) -> None:
        """Give each master weight its gradient, in buffers that live as long as the run."""
        for slot in self._slots:
            grad = self._gradient(slot.param)
            if slot.master is slot.param:
                if slot.total is not None:
                    slot.param.grad = slot.total.to(slot.param.dtype)
                continue
            if grad is None:
                slot.master.grad = None
                continue
            if slot.master_grad is None:
                slot.master_grad = torch.empty_like(slot.master)
            slot.master_grad.copy_(grad.to_dense() if grad.is_sparse else grad)
            slot.master.grad = slot.master_grad

    def scale(self, factor: float) -> None:
        """See `Partitioner.scale`."""
        grads = [s.master.grad for s in self._slots if s.master.grad is not None]
        if grads:
            torch._foreach_mul_(grads, factor)

    @torch.no_grad()
    def publish(self) -> None:
        """See `Partitioner.publish`."""
        if not self._plain:
            pairs = [(s.param, s.master) for s in self._slots if s.master is not s.param]
            torch._foreach_copy_([p for p, _ in pairs], [m for _, m in pairs])

    def zero_grad(self) -> None:
        """See `Partitioner.zero_grad`."""
        self._reduced = False
        if self._running:  # a backward broke off
            self._running = False
            for bucket in self._buckets or ():
                bucket.settle()
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
        for name, tensor, held in self._tensors(optimizer):
            copies = tuple(a for a in mesh.expand(mesh.names) if a not in held)
            yield StateTensor(name, tensor, tuple(tensor.shape), 0, tensor.numel(), held, True, copies)
        persistent = self._module.state_dict(keep_vars=True)
        for name, buffer in self._module.named_buffers():
            if name in persistent:
                shape = tuple(buffer.shape)
                yield StateTensor(f"module/{name}", buffer, shape, 0, buffer.numel(), (), mesh.rank == 0)

    def _tensors(self, optimizer: Optimizer | None) -> Iterable[tuple[str, Tensor, tuple[str, ...]]]:
        assert self._module is not None
        for name, param in self._module.named_parameters():
            yield f"module/{name}", param.data, self.ctx.params[param].held
        for slot in self._slots:
            if slot.master is not slot.param:
                yield f"master/{slot.name}", slot.master.data, slot.held
            for key, value in optimizer.state.get(slot.master, {}).items() if optimizer is not None else ():
                if isinstance(value, Tensor):
                    yield f"optimizer/{key}/{slot.name}", value, slot.held

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
                values = {key: source.read(name).view(source.shape(name)) for key, name in names.items()}
                set_optimizer_state(optimizer, slot.master, values)

    def locate(self, param: nn.Parameter) -> Holding | None:
        """See `Partitioner.locate`."""
        slot = self._by_param.get(param)
        return None if slot is None else _Copy(self, slot)

    def detach(self) -> None:
        """See `Partitioner.detach`."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if self._refresh is not None:
            self._refresh.remove()
        for slot in self._slots:
            slot.total = slot.master_grad = None
        self._buckets, self._place = [], {}


class _Copy(Holding):
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
        """See `Holding.round`."""
        if self.updated is not self.param:
            self.param.copy_(self.updated)

    def set_weight(self, master: Tensor) -> None:
        """See `Holding.set_weight`."""
        self.param.copy_(master)

    @property
    def window_open(self) -> bool:
        """See `Holding.window_open`."""
        return any(self._owner._gradient(s.param) is not None for s in self._owner._slots)

    @property
    def grad_dtype(self) -> torch.dtype:
        """See `Holding.grad_dtype`."""
        accumulate = self._owner.ctx.precision.accumulate
        return accumulate if accumulate is not None and self.param.is_floating_point() else self.param.dtype

    @property
    def _factor(self) -> float:
        """What the step will still multiply what this rank holds by, in effect: reduction sums over ranks, then
        divides by all of dp. What is averaged already is the same on all of them."""
        reduced = self._owner._reduced and not self._lone
        return 1.0 if reduced else len(self.ranks) / self._owner.ctx.mesh.size("dp")

    def _held(self) -> Tensor | None:
        grad = self._owner._gradient(self.param)
        return None if grad is None else (grad.to_dense() if grad.is_sparse else grad).detach().reshape(-1)

    def reduced(self) -> Tensor | None:
        """See `Holding.reduced`."""
        grad = None if self.has_pending else self._held()
        return grad if grad is None or self._factor == 1.0 else grad * self._factor

    @property
    def has_pending(self) -> bool:
        """See `Holding.has_pending`."""
        return not (self._lone or self._owner._reduced) and self._owner._gradient(self.param) is not None

    def pending(self) -> Tensor | None:
        """See `Holding.pending`."""
        grad = self._held() if self.has_pending else None
        return None if grad is None else grad / self._owner.ctx.mesh.size("dp")

    def set_grad(self, values: Tensor) -> None:
        """See `Holding.set_grad`."""
        values = (values / self._factor).view(self.shape)
        total = self._slot.total
        if self.grad_dtype != self.param.dtype:
            total = self._slot.total = torch.empty_like(self.param, dtype=self.grad_dtype) if total is None else total
            total.copy_(values)
            return
        if self.param.grad is None or self.param.grad.is_sparse:
            self.param.grad = torch.empty_like(self.param)
        self.param.grad.copy_(values)


def broadcast_from_first(mesh: Mesh, tensors: Iterable[tuple[tuple[str, ...], Tensor]]) -> None:
    """Give each of `tensors`, in place, the values of the first rank along its axes. Collective; one call per kind."""
    batches: dict[tuple[Any, ...], list[Tensor]] = {}
    for axes, tensor in tensors:
        if axes and tensor.numel():
            batches.setdefault((axes, tensor.dtype, tensor.device), []).append(tensor)
    for (axes, _, _), members in batches.items():
        flat = torch.cat([t.reshape(-1) for t in members])
        comm.broadcast(flat, src=mesh.ranks(*axes)[0], group=mesh.group(*axes))
        for tensor, piece in zip(members, flat.split([t.numel() for t in members]), strict=True):
            tensor.copy_(piece.view_as(tensor))


def _read(source: StateSource, name: str, like: Tensor) -> Tensor:
    shape = source.shape(name)
    if tuple(like.shape) != shape:
        raise UsageError(
            f"checkpoint state {name!r} has shape {shape}, the model's is {tuple(like.shape)}; was it saved "
            "by another model?"
        )
    return source.read(name).view(shape)


def saved_optimizer_states(source: StateSource) -> dict[str, dict[str, str]]:
    """``{parameter: {key: name in source}}`` of all optimizer states that a checkpoint has."""
    found: dict[str, dict[str, str]] = {}
    for name in source.names():
        kind, _, rest = name.partition("/")
        if kind == "optimizer":
            key, _, param = rest.partition("/")
            found.setdefault(param, {})[key] = name
    return found


def set_optimizer_state(optimizer: Optimizer, master: Tensor, values: Mapping[str, Tensor]) -> None:
    """Make `values`, CPU tensors by key, the state of `master`. None at all: its state has not begun."""
    if not values:
        optimizer.state.pop(master, None)
        return
    state: dict[str, Any] = optimizer.state[master]
    for key, value in values.items():
        old = state.get(key)
        if isinstance(old, Tensor):
            device = old.device
        elif value.dim() == 0 and (master.dim() != 0 or key == "step"):
            # A counter stays on the CPU unless the optimizer has put it on the device.
            on_device = any(g.get("fused") or g.get("capturable") for g in optimizer.param_groups)
            device = master.device if on_device else torch.device("cpu")
        else:
            device = master.device
        if value.shape == master.shape and not master.is_contiguous():  # fused optimizers go by strides
            value = torch.empty_like(master, dtype=value.dtype, device="cpu").copy_(value)
        state[key] = value.to(device)
