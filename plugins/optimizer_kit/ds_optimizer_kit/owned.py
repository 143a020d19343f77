"""States of whole matrices: each is with the rank that transforms its matrix.

They are in the optimizer's ``state`` under keys that are no parameters, as torch allows: so
``state_dict`` has them, and partitioners, which cut what belongs to parameters, leave them alone.
Checkpoints have them as "matrix/<key>/<parameter>", one state for all matrices that are stacked in
a parameter, each matrix a range of it. A run in another layout reads those of its own matrices.

A store may have their memory while their matrices are not updated.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from ds_run_state.states import StateTensor
from torch import Tensor

from ds_core import comm

if TYPE_CHECKING:
    from ds_run_state.states import StateSource
    from ds_state_stores import StateStore
    from torch.optim import Optimizer

    from ds_optimizer_kit.exchange import Unit
    from ds_optimizer_kit.layout import Lane

_KIND = "matrix"


class OwnedStates:
    """Those of one optimizer.

    units: the matrices that this rank transforms.
    places: of the optimizer's tensors among all, the same on all ranks that own matrices of them.
    store: has the states between updates; None: they stay in memory.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        units: Iterable[Unit],
        places: Mapping[Tensor, int],
        store: StateStore | None = None,
    ) -> None:
        self._optimizer = optimizer
        self._store = store
        self._keys: dict[Unit, Any] = {
            unit: f"{_KIND} {places[unit.tensor]}.{unit.number}" for unit in units
        }
        # An optimizer that has trained by itself brings the states of all matrices.
        mine = set(self._keys.values())
        keys: list[Any] = list(optimizer.state)
        for key in keys:
            # Those of parameters are tensors.
            if isinstance(key, str) and key.startswith(_KIND) and key not in mine:
                del optimizer.state[key]  # type: ignore[arg-type]

    def step(self, unit: Unit) -> int:
        """The number of the matrix's next update, from 1."""
        return int(self._of(unit).get("step", 0)) + 1

    def expect(self, units: Iterable[Unit]) -> None:
        """Start to read the states of these matrices, which are updated soon."""
        if self._store is not None:
            self._store.fetch(self._stored(units))

    def stacked(self, units: Sequence[Unit], like: Tensor) -> dict[str, Tensor]:
        """The states of these matrices, [n, ...] each, on the device and in the dtype of `like`."""
        if self._store is not None:
            tensors = self._stored(units)
            self._store.fetch(tensors)
            self._store.wait(tensors)
        rows = [self._of(unit) for unit in units]
        return {
            key: torch.stack([row[key] for row in rows]).to(like)
            for key in rows[0]
            if key != "step"
        }

    def keep(self, units: Sequence[Unit], states: Mapping[str, Tensor]) -> None:
        """Make `states` those of these matrices, after one more update."""
        for index, unit in enumerate(units):
            step = torch.tensor(float(self.step(unit)))
            # With an optimizer on the host they rest there, as Adam's do.
            values = {k: v[index].to(unit.tensor.device) for k, v in states.items()}
            if self._store is not None:
                values = self._own(unit, values)
            self._optimizer.state[self._keys[unit]] = {"step": step, **values}
        if self._store is not None:
            self._store.evict(self._stored(units))

    def pieces(self) -> Iterator[StateTensor]:
        """For checkpoints."""
        for unit in self._keys:
            part = unit.part
            # Along the axes of a slice ranks have parts of one matrix, and one owner of it.
            held = tuple(axis for axis in part.held if axis not in part.mine.slice.axes)
            for key, value in self._of(unit).items():
                start = unit.number * value.numel()
                yield StateTensor(
                    f"{_KIND}/{key}/{part.name}",
                    self._read(value),
                    (*_stack(unit), *value.shape),
                    start,
                    start + value.numel(),
                    held,
                    part.counted,
                    part.copies,
                )

    def load(self, source: StateSource) -> None:
        """Read those of this rank's matrices; where there are none, they begin anew."""
        saved: dict[str, dict[str, str]] = {}
        for name in source.names():
            kind, _, rest = name.partition("/")
            if kind == _KIND:
                key, _, param = rest.partition("/")
                saved.setdefault(param, {})[key] = name
        for unit, place in self._keys.items():
            if self._store is not None:
                self._store.discard(self._stored([unit]))
            self._optimizer.state.pop(place, None)
            for key, name in saved.get(unit.name, {}).items():
                shape = source.shape(name)[len(_stack(unit)) :]
                size = math.prod(shape)
                value = source.read(name, unit.number * size, (unit.number + 1) * size).view(shape)
                device = "cpu" if key == "step" else unit.tensor.device
                self._optimizer.state[place][key] = value.to(device)
            if self._store is not None:
                states = self._of(unit)
                states.update({k: v.clone() for k, v in states.items()})
                self._store.evict(self._stored([unit]))

    def whole(self, lane: Lane, owners: Mapping[Unit, int], key: str) -> Tensor | None:
        """State `key` of all matrices of one parameter, [stack, ...]; None where nobody has it.

        owners: of the matrices, as `MatrixExchange.owners_of` gives them with their lane, on whose
            ranks this is collective.
        """
        # Without axes there is one rank, whatever the group of its lane.
        group = lane.group if lane.axes else comm.ALONE
        mine = {
            u.number: self._of(u)[key] for u in owners if u in self._keys and key in self._of(u)
        }
        said = {str(number): [list(v.shape), str(v.dtype)] for number, v in mine.items()}
        known = {n: row for rank in comm.all_gather_json(said, group) for n, row in rank.items()}
        if len(known) < len(owners):
            return None
        found = []
        for unit, place in owners.items():
            shape, dtype = known[str(unit.number)]
            value = torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")))
            value = value.to(lane.device)
            if unit.number in mine:
                value.copy_(self._read(mine[unit.number]))
            if comm.world_size(group) > 1:
                source = torch.distributed.get_global_rank(group, place)
                comm.broadcast(value, src=source, group=group)
            found.append(value)
        stack = _stack(next(iter(owners)))
        return torch.stack(found).view(*stack, *found[0].shape)

    def put(self, owners: Mapping[Unit, int], key: str, value: Tensor) -> None:
        """Make `value` state `key` of the matrices among `owners` that are this rank's."""
        first = next(iter(owners))
        rows = value.reshape(len(owners), *value.shape[len(_stack(first)) :])
        for unit, row in zip(owners, rows, strict=True):
            if unit not in self._keys:
                continue
            if self._store is not None:
                self._store.write(self._of(unit)[key], row)
            else:
                self._of(unit)[key].copy_(row)

    def _stored(self, units: Iterable[Unit]) -> list[Tensor]:
        """The states of these matrices that a store has between updates."""
        return [value for unit in units for value in self._of(unit).values() if value.dim()]

    def _own(self, unit: Unit, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """`values` in the tensors of the states that the matrix has, or in new ones: a store frees
        whole storages."""
        assert self._store is not None
        old = self._of(unit)
        found = {}
        for key, value in values.items():
            before = old.get(key)
            if before is not None and (before.shape, before.dtype) == (value.shape, value.dtype):
                found[key] = before.copy_(value)
            else:
                found[key] = value.clone()
        kept = set(map(id, found.values()))
        self._store.discard([v for v in old.values() if v.dim() and id(v) not in kept])
        return found

    def _read(self, value: Tensor) -> Tensor:
        return value if self._store is None or not value.dim() else self._store.read(value)

    def _of(self, unit: Unit) -> dict[str, Tensor]:
        found: dict[str, Tensor] = self._optimizer.state.get(self._keys[unit], {})
        return found


def _stack(unit: Unit) -> tuple[int, ...]:
    """The dimensions of the parameter that number matrices."""
    return unit.part.shape[: len(unit.part.shape) - len(unit.shape)]
