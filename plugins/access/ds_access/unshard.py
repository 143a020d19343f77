"""States of parameters put together over the ranks that hold their ranges; the collective half of
`ds_access`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from ds_access.param_shard import HasWholeStates
from ds_core import comm
from ds_core.errors import UsageError

if TYPE_CHECKING:
    from ds_access.param_shard import ParamShard, Ranges

WHEN = (
    "gradients are there from backward until step: call it after engine.backward(loss) and "
    "before "
    "engine.step()"
)


def owner(held: ParamShard) -> int:
    """The place in the group of the rank that updates most of the parameter."""
    ranges = held.updated_ranges
    return max(range(len(ranges)), key=lambda i: ranges[i][1] - ranges[i][0])


def _batches(helds: Sequence[ParamShard]) -> Iterable[list[int]]:
    """Places in `helds` of those that share a group, in order of first appearance."""
    found: dict[tuple[int, ...], list[int]] = {}
    for place, held in enumerate(helds):
        found.setdefault(tuple(held.ranks), []).append(place)
    return found.values()


def put_together(
    helds: Sequence[ParamShard], pieces: Sequence[Tensor], ranges: Sequence[Ranges]
) -> list[Tensor]:
    """The whole tensors of which ranks hold `pieces`, in `ranges`; each owner broadcasts all of one
    dtype at once.
    """
    out = [
        torch.empty(h.shape, dtype=p.dtype, device=h.device)
        for h, p in zip(helds, pieces, strict=True)
    ]
    for batch in _batches(helds):
        for dtype in dict.fromkeys(pieces[i].dtype for i in batch):
            same = [i for i in batch if pieces[i].dtype == dtype]
            _fill(helds[batch[0]], [(ranges[i], pieces[i], out[i].view(-1)) for i in same], dtype)
    return out


def _fill(
    here: ParamShard, jobs: Sequence[tuple[Ranges, Tensor, Tensor]], dtype: torch.dtype
) -> None:
    """Fill the last of each (ranges, piece, whole flat tensor) over the group of `here`."""
    shared = []
    for ranges, piece, whole in jobs:
        if all(r == (0, whole.numel()) for r in ranges):
            whole.copy_(piece)
        else:
            shared.append((ranges, piece, whole))
    if not shared:
        return
    for index, rank in enumerate(here.ranks):
        sizes = [ranges[index][1] - ranges[index][0] for ranges, _, _ in shared]
        sent = torch.empty(sum(sizes), dtype=dtype, device=here.device)
        parts = sent.split(sizes)
        if index == here.index:
            for (_, piece, _), part in zip(shared, parts, strict=True):
                part.copy_(piece)
        comm.broadcast(sent, src=rank, group=here.group)
        for (ranges, _, whole), part in zip(shared, parts, strict=True):
            whole[slice(*ranges[index])].copy_(part)


def flags(helds: Sequence[ParamShard]) -> list[tuple[bool, bool, bool]]:
    """Per parameter, of any rank of its group: has a reduced gradient, has one pending, has any
    gradient at all.
    """
    out: list[tuple[bool, bool, bool]] = [(False, False, False)] * len(helds)
    for batch in _batches(helds):
        mine = [
            [h.reduced() is not None, h.has_pending, h.window_open]
            for h in (helds[i] for i in batch)
        ]
        everyone = comm.all_gather_json(mine, helds[batch[0]].group)
        for at, place in enumerate(batch):
            found = [any(rank[at][what] for rank in everyone) for what in range(3)]
            out[place] = cast("tuple[bool, bool, bool]", tuple(found))
    return out


def whole_grads(helds: Sequence[ParamShard], needed: str = "") -> list[Tensor | None]:
    """The whole gradients; None for those that no rank has.

    needed: who cannot go on without any.
    """
    found = flags(helds)
    if needed and not any(f[-1] for f in found):
        raise UsageError(f"{needed}: there are no gradients now; {WHEN}")
    out: list[Tensor | None] = [None] * len(helds)
    places = [i for i, f in enumerate(found) if f[0]]
    pieces = []
    reduced = [helds[i] for i in places]
    for held in reduced:
        piece = held.reduced()
        start, stop = held.ranges[held.index]
        pieces.append(
            torch.zeros(stop - start, dtype=held.grad_dtype, device=held.device)
            if piece is None
            else piece
        )
    for place, whole in zip(
        places, put_together(reduced, pieces, [h.ranges for h in reduced]), strict=True
    ):
        out[place] = whole
    for batch in _batches(helds):
        waiting = [i for i in batch if found[i][1]]
        for dtype in dict.fromkeys(helds[i].grad_dtype for i in waiting):
            same = [i for i in waiting if helds[i].grad_dtype == dtype]
            for place, more in zip(same, _reduce([helds[i] for i in same], dtype), strict=True):
                so_far = out[place]
                out[place] = more if so_far is None else so_far.add_(more)
    return out


def _reduce(helds: Sequence[ParamShard], dtype: torch.dtype) -> list[Tensor]:
    """What reduction will add for gradients that are pending, which stay so."""
    sizes = [h.numel for h in helds]
    flat = torch.zeros(sum(sizes), dtype=dtype, device=helds[0].device)
    for held, part in zip(helds, flat.split(sizes), strict=True):
        if (grad := held.pending()) is not None:
            part.copy_(grad)
    comm.all_reduce(flat, group=helds[0].group)
    return [
        part.view(held.shape).clone() for held, part in zip(helds, flat.split(sizes), strict=True)
    ]


@dataclass(frozen=True, slots=True)
class Kind:
    """What ranks agree an optimizer state is.

    value: of a state that is one number per parameter, else None.
    whole: it is not one value per element.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    value: Any
    whole: bool


def states_of(held: ParamShard, optimizer: Any) -> dict[str, Any]:
    """What the optimizer keeps for it here, tensors and numbers by key."""
    found: dict[str, Any] = optimizer.state.get(held.updated, {})
    return {
        k: v for k, v in found.items() if isinstance(v, (Tensor, int, float)) and isinstance(k, str)
    }


def whole_state(optimizer: object, held: ParamShard, key: str) -> Tensor | None:
    """A state that the optimizer keeps of whole parameters; None where it has none. Collective."""
    if not isinstance(optimizer, HasWholeStates):
        return None
    found = optimizer.whole_state(held.updated, key)
    return None if found is None else found.to(held.device)


def put_whole_state(optimizer: object, held: ParamShard, key: str, value: Tensor) -> None:
    """Make `value` what `whole_state` gives."""
    assert isinstance(optimizer, HasWholeStates)
    optimizer.put_whole_state(held.updated, key, value)


def agree_kind(held: ParamShard, optimizer: Any, key: str) -> Kind:
    """What state `key` is, as the ranks that have it say.

    Collective. ValueError when no rank has it.
    """
    said: dict[str, Any] = {}
    for name, value in states_of(held, optimizer).items():
        if not isinstance(value, Tensor):
            said[name] = [str(torch.as_tensor(value).dtype), [], value, False]
        elif value.shape == held.updated.shape and (value.dim() or name != "step"):
            said[name] = [str(value.dtype), list(held.shape), None, False]
        elif value.dim() == 0:
            said[name] = [str(value.dtype), [], held.read(value).item(), False]
        else:
            said[name] = [str(value.dtype), list(value.shape), None, True]
    everyone = comm.all_gather_json(said, held.group)
    keys = sorted({name for rank in everyone for name in rank})
    if key not in keys:
        raise ValueError(no_state(held, key, keys))
    dtype, shape, value, whole = next(rank[key] for rank in everyone if key in rank)
    if whole and held.updated_ranges[owner(held)] != (0, held.numel):
        raise UsageError(
            f"optimizer state {key!r} of parameter {held.name!r} has shape {tuple(shape)} on one "
            "rank; where several "
            "ranks hold parts of a parameter, only states of one value per element, or of one "
            "value, can be whole"
        )
    return Kind(getattr(torch, dtype.removeprefix("torch.")), tuple(shape), value, whole)


def no_state(held: ParamShard, key: str, keys: Sequence[str]) -> str:
    """What to say about a state that is not among `keys`."""
    there = (
        f"there are {', '.join(repr(k) for k in keys)}"
        if keys
        else "it has none before its first step"
    )
    return f"parameter {held.name!r} has no optimizer state {key!r}; {there}"
