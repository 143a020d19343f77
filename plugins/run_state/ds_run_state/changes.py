"""Changes of a model that are taken back when its run ends; a forward in the place of a module's
own; the tensors in what a module is given and gives.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ds_core import comm
from ds_core.undo import Undo
from ds_run_state.slices import Slice

if TYPE_CHECKING:
    from ds_core.context import Context
    from ds_core.mesh import Mesh

_ABSENT: Any = object()

Place = Callable[[], Any]
"""Gives the dict in which something lies."""


@contextlib.contextmanager
def changing(model: nn.Module, undo: Undo) -> Iterator[None]:
    """What is changed of `model` inside is changed back by `undo`: its modules, their classes,
    attributes and hooks.

    Also attributes and hooks of its parameters, and which of them are trained. Not their values.
    What has changed again since, stays. What was replaced lives on until then: a transform that
    shall free memory empties it.
    """
    # Attributes of modules and parameters are compared after the change, so that nobody who changes
    # them has to list what.
    before = [_Module.of(module) for module in model.modules()]
    params = [_Param.of(param) for param in model.parameters()]
    try:
        yield
    finally:
        changed = [change for known in before for change in known.changes()]
        changed += [change for known in params for change in known.changes()]

        def change_back() -> None:
            # If one place was changed several times, the first change is undone last.
            for change in reversed(changed):
                change()

        undo(change_back)


@torch.no_grad()
def gather_slices(pieces: Mapping[nn.Parameter, Slice], mesh: Mesh, axis: str) -> None:
    """Give the ranks along `axis` whole parameters again, of which `pieces` says what this one has.

    Collective.

    For ``ctx.undo(functools.partial(gather_slices, pieces, ctx.mesh, axis), collective=True)``.
    """
    group = mesh.group(axis)
    ranks = mesh.ranks(axis)
    index = mesh.index(axis)
    # Which part each rank has, since ranks may have unequal ones.
    everyone = comm.all_gather_json([piece.ranges for piece in pieces.values()], group=group)
    for number, (param, piece) in enumerate(pieces.items()):
        whole = param.data.new_empty(piece.shape)
        for place, rank in enumerate(ranks):
            ranges = tuple(
                tuple((first, size) for first, size in along) for along in everyone[place][number]
            )
            theirs = dataclasses.replace(piece, ranges=ranges)
            # One part after the other: beside the full parameter only one is in memory.
            part = param.data.contiguous() if place == index else param.data.new_empty(theirs.size)
            comm.broadcast(part, src=rank, group=group)
            for box, at in theirs.parts():
                inside = tuple(
                    slice(first, first + size) for first, size in zip(at, box.size, strict=True)
                )
                whole[box.slices()] = part[inside]
        reshape(param, whole)


def reshape(param: nn.Parameter, data: Tensor) -> None:
    """Make `data`, of another shape, the values of `param`; its gradient goes.

    While a graph of an earlier forward is alive (a loss that somebody keeps), torch takes gradients
    for the old shape. It forgets that when the dtype changes.
    """
    param.grad = None
    other = torch.float32 if data.dtype == torch.float64 else torch.float64
    param.data = torch.empty(0, dtype=other, device=param.device)
    param.data = data


@dataclass(frozen=True)
class Shared:
    """What a module holds and copies of the module share, since it cannot be copied: a process
    group.
    """

    value: Any

    def __deepcopy__(self, memo: Any) -> Shared:
        return self


class StandIn:
    """The forward of one module, in the place of ``module.forward``; `forward` is the one it stands
    before.

    It is put there by ``module.forward = StandIn(module)``. It has the signature of `forward`.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.forward: Callable[..., Any] = module.forward
        # Without the attributes of what it stands before, which may be another of these.
        functools.update_wrapper(self, module.forward, updated=())

    def __reduce__(self) -> Any:
        """Copies of the model, by copy or pickle, have their class's forward."""
        return getattr, (self.module, "forward")  # while the copy is made it has no other

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the module gives."""
        return self.forward(*args, **kwargs)


class TrainingStandIn(StandIn):
    """A `StandIn` that changes its module's forward only while a running engine trains it."""

    def __init__(self, module: nn.Module, ctx: Context) -> None:
        super().__init__(module)
        self.ctx = ctx

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """`train`'s output in training, else what the module gives."""
        engine = self.ctx.engine_ref()
        # None: the engine was destroyed, and the module is no longer trained by it.
        if engine is None or not self.module.training:
            return self.forward(*args, **kwargs)
        return self.train(engine.global_steps, args, kwargs)

    def train(self, step: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the module gives in training, after `step` optimizer steps."""
        raise NotImplementedError


@dataclass(frozen=True)
class _Module:
    """A module as it was."""

    module: nn.Module
    kind: type
    attributes: dict[str, Any]
    # Copies of its attributes that are dicts: parameters, modules, hooks.
    entries: dict[str, dict[Any, Any]]

    @classmethod
    def of(cls, module: nn.Module) -> _Module:
        own = dict(vars(module))
        return cls(
            module,
            type(module),
            own,
            {name: dict(v) for name, v in own.items() if isinstance(v, dict)},
        )

    def changes(self) -> Iterator[Callable[[], object]]:
        """What changes it back."""
        if type(self.module) is not self.kind:
            yield functools.partial(_set_class, self.module, type(self.module), self.kind)
        yield from _differences(lambda: vars(self.module), self.attributes)
        for name, entries in self.entries.items():
            if isinstance(vars(self.module).get(name), dict):
                # Asked again when it is changed back: others, such as dscore-zero, may put another dict
                # there meanwhile.
                yield from _differences(lambda name=name: vars(self.module)[name], entries)  # type: ignore[misc]


@dataclass(frozen=True)
class _Param:
    """A parameter as it was."""

    param: nn.Parameter
    trained: bool
    attributes: dict[str, Any]
    hooks: dict[Any, Any]
    # Hooks that are called once a gradient was accumulated.
    after: dict[Any, Any]

    @classmethod
    def of(cls, param: nn.Parameter) -> _Param:
        hooks = dict(param._backward_hooks or {})
        return cls(param, param.requires_grad, dict(vars(param)), hooks, dict(_after(param)))

    def changes(self) -> Iterator[Callable[[], object]]:
        """What changes it back."""
        if self.param.requires_grad is not self.trained:
            yield functools.partial(self.param.requires_grad_, self.trained)
        yield from _differences(lambda: vars(self.param), self.attributes)
        yield from _differences(lambda: self.param._backward_hooks or {}, self.hooks)
        yield from _differences(lambda: _after(self.param), self.after)


def _after(param: nn.Parameter) -> dict[Any, Any]:
    hooks: dict[Any, Any] | None = param._post_accumulate_grad_hooks
    return hooks or {}


def _differences(place: Place, before: dict[Any, Any]) -> Iterator[Callable[[], object]]:
    now = place()
    for key in (*before, *(key for key in now if key not in before)):
        is_now = now.get(key, _ABSENT)
        was = before.get(key, _ABSENT)
        if is_now is not was:
            yield functools.partial(_set_back, place, key, is_now, was)


def _set_back(held: Place, key: Any, changed: Any, before: Any) -> None:
    """Put back what was there, where it is still as the change left it."""
    place = held()
    # Somebody has changed it since: theirs stays.
    if place.get(key, _ABSENT) is not changed:
        return
    if before is _ABSENT:
        place.pop(key, None)
    else:
        place[key] = before


def _set_class(module: nn.Module, changed: type, before: type) -> None:
    if type(module) is changed:
        module.__class__ = before


# -- the tensors in arguments and outputs ---------------------------------------------------------


def leaves(value: Any) -> Iterator[Tensor]:
    """The tensors in nested containers, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from leaves(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from leaves(item)


def replace_leaves(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """`value` with each of `leaves` replaced, in the same order.

    Mappings are changed in place, so that the output of a model of transformers stays what it is.
    """
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, MutableMapping):
        for key in list(value):
            value[key] = replace_leaves(value[key], change)
    elif isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        items = [replace_leaves(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value
