"""The states of a model as named tensors: what partitioners give to checkpoints, and take from
them.

Those of the core's `Replicated` are given and taken here. A partitioner that shards has the two
methods of `HasStates`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from ds_core.errors import UsageError
from ds_core.partition import Replicated

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from ds_core.context import Context
    from ds_core.partition import ParamInfo, Partitioner
    from ds_run_state.slices import Box


@dataclass(frozen=True, slots=True)
class StateTensor:
    """This rank's piece of one model state, for checkpoints."""

    # ``"module/<param>"``, ``"master/<param>"`` or ``"optimizer/<key>/<param>"``.
    name: str
    # The live piece.
    tensor: Tensor
    # The shape of the full state.
    shape: tuple[int, ...]
    # The piece as a range of the row-major flattened state, or of `box`.
    start: int
    stop: int
    # Axes on which ranks have different states under this name.
    held: tuple[str, ...]
    # Whether this rank writes the piece, or a share of it.
    store: bool
    # Axes along which ranks have this very piece, with `store` on all of them.
    copies: tuple[str, ...] = ()
    # Gives the values of `tensor`, or of a view of it, where it may be empty: where it is kept in a
    # `StateStore` that gives memory back.
    read: Callable[[Tensor], Tensor] | None = None
    # Where only a box of the state is divided here; None: all of it.
    box: Box | None = None

    def values(self) -> Tensor:
        """The values of `tensor`, wherever they rest."""
        return self.tensor if self.read is None else self.read(self.tensor)


class StateSource(Protocol):
    """States in a checkpoint, by the names of `StateTensor`."""

    def names(self) -> Sequence[str]:
        """Every state that this rank may read."""

    def shape(self, name: str) -> tuple[int, ...]:
        """The whole state's shape."""

    def read(
        self, name: str, start: int = 0, stop: int | None = None, *, into: object = None
    ) -> Tensor:
        """The range [start, stop) of the row-major flattened state, as a 1-d CPU tensor.

        into: what it is to replace. When that is a contiguous tensor on the CPU, of the stored
        dtype and this size, the range is read straight into it, and the answer is a view of it;
        else it is left alone and the answer is new.
        """


@runtime_checkable
class HasStates(Protocol):
    """A partitioner whose states can be saved and loaded.

    It may have an attribute `not_exported`: why ``save_16bit_model`` writes nothing, as the message
    says.
    """

    def states(self, optimizer: Optimizer | None) -> Iterable[StateTensor]:
        """This rank's model states; those of `optimizer` too when given."""

    def load_states(
        self, source: StateSource, optimizer: Optimizer | None, *, strict: bool = True
    ) -> None:
        """Read this rank's model states; those of `optimizer` too when given.

        strict: a weight that the checkpoint lacks is an error. Without master weights in the
        checkpoint they are made from the module's.
        """


@runtime_checkable
class HasOwnedStates(Protocol):
    """An optimizer with states that are no parameter's, each on one of the ranks that share it: a
    preconditioner of a whole matrix.

    Their names begin with a word of its own, such as "matrix/", so that partitioners let them be.
    """

    def owned_states(self) -> Iterable[StateTensor]:
        """Those on this rank."""

    def load_owned_states(self, source: StateSource) -> None:
        """Read those that are this rank's in the layout of now. Not collective."""


def states_of(partitioner: Partitioner) -> HasStates:
    """What gives and takes the states of `partitioner`.

    Raises UsageError where it cannot be saved.
    """
    if isinstance(partitioner, HasStates):
        return partitioner
    if isinstance(partitioner, Replicated):
        return ReplicatedStates(partitioner)
    raise UsageError(
        f"{type(partitioner).__name__} cannot be saved to a checkpoint or loaded from one: it has "
        "no `states` and "
        "`load_states` (ds_run_state.states.HasStates)"
    )


class ReplicatedStates:
    """The states of `Replicated`: every rank has unsharded ones."""

    def __init__(self, partitioner: Replicated) -> None:
        self._ctx = partitioner.ctx
        self._module = partitioner.module
        self._slots = partitioner.slots

    def states(self, optimizer: Optimizer | None) -> Iterable[StateTensor]:
        """See `HasStates.states`; replicas share the writing, but buffers may differ: the first
        rank's count.
        """
        mesh = self._ctx.mesh
        for name, tensor, info in self._tensors(optimizer):
            copies = tuple(a for a in mesh.expand(mesh.names) if a not in info.held)
            yield StateTensor(
                name,
                tensor,
                tuple(tensor.shape),
                0,
                tensor.numel(),
                info.held,
                info.counted,
                copies,
            )
        yield from buffer_states(self._ctx, self._module)

    def _tensors(self, optimizer: Optimizer | None) -> Iterable[tuple[str, Tensor, ParamInfo]]:
        for name, param in self._module.named_parameters():
            yield f"module/{name}", param.data, self._ctx.params[param]
        for slot in self._slots.values():
            if slot.master is not slot.param:
                yield f"master/{slot.info.name}", slot.master.data, slot.info
            for key, value in (
                optimizer.state.get(slot.master, {}).items() if optimizer is not None else ()
            ):
                if isinstance(value, Tensor):
                    yield f"optimizer/{key}/{slot.info.name}", value, slot.info

    @torch.no_grad()
    def load_states(
        self, source: StateSource, optimizer: Optimizer | None, *, strict: bool = True
    ) -> None:
        """See `HasStates.load_states`."""
        known = set(source.names())
        for state in self.states(None):
            if state.name.startswith("module/") and (strict or state.name in known):
                check_shape(source, state.name, state.shape)
                state.tensor.copy_(read_state(source, state.name, state.tensor))
        saved = saved_optimizer_states(source) if optimizer is not None else {}
        for slot in self._slots.values():
            if slot.master is not slot.param:
                name = f"master/{slot.info.name}"
                if name in known:
                    check_shape(source, name, slot.master.shape)
                slot.master.data.copy_(
                    read_state(source, name, slot.master) if name in known else slot.param.data
                )
            if optimizer is not None:
                old = optimizer.state.get(slot.master, {})
                names = saved.get(slot.info.name, {})
                values = {
                    key: read_state(source, name, old.get(key)) for key, name in names.items()
                }
                set_optimizer_state(optimizer, slot.master, values)


def buffer_states(ctx: Context, module: nn.Module) -> Iterator[StateTensor]:
    """The persistent buffers; replicas may differ in theirs, and the first rank's count."""
    mesh = ctx.mesh
    persistent = module.state_dict(keep_vars=True)
    for name, buffer in module.named_buffers():
        if name in persistent:
            info = ctx.buffers.get(name)  # None: one that came after initialize
            held, counted = (info.held, info.counted) if info is not None else ((), True)
            others = [a for a in mesh.expand(mesh.names) if a not in held]
            store = counted and mesh.index(*others) == 0
            yield StateTensor(
                f"module/{name}", buffer, tuple(buffer.shape), 0, buffer.numel(), held, store
            )


def saved_optimizer_states(source: StateSource) -> dict[str, dict[str, str]]:
    """``{parameter: {key: name in source}}`` of all optimizer states that a checkpoint has."""
    found: dict[str, dict[str, str]] = {}
    for name in source.names():
        kind, _, rest = name.partition("/")
        if kind == "optimizer":
            key, _, param = rest.partition("/")
            found.setdefault(param, {})[key] = name
    return found


def check_shape(source: StateSource, name: str, shape: Sequence[int]) -> None:
    """Raise UsageError unless the unsharded state `name` has `shape` in the checkpoint."""
    if (saved := source.shape(name)) != tuple(shape):
        raise UsageError(
            f"checkpoint state {name!r} has shape {saved}, the model's is {tuple(shape)}; was it "
            "saved by another "
            "model?"
        )


def read_state(source: StateSource, name: str, into: object) -> Tensor:
    """The whole state in its shape, on the CPU; into: see `StateSource.read`."""
    return source.read(name, into=into).view(source.shape(name))


def set_optimizer_state(optimizer: Optimizer, master: Tensor, values: Mapping[str, Tensor]) -> None:
    """Make `values`, CPU tensors by key, the state of `master`.

    None at all: its state has not begun.
    """
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
        # fused optimizers go by strides
        if value.shape == master.shape and not master.is_contiguous():
            value = torch.empty_like(master, dtype=value.dtype, device="cpu").copy_(value)
        state[key] = value.to(device)
