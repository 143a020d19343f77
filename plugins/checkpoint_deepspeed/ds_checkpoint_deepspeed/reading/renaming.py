"""A foreign checkpoint under our names: experts become rows of stacked weights, layers of pipelines
get theirs.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

from ds_run_state.states import StateTensor

from ds_checkpoint_deepspeed.reading.foreign import Foreign
from ds_checkpoint_deepspeed.reading.names import expert_row, our_name


def in_our_names(found: Foreign) -> Foreign:
    """The same states under the names that ds_core's modules have."""

    def named(name: str) -> str:
        row = expert_row(name)
        name = row[0] if row is not None else name
        return our_name(name, pipeline=found.pipeline)

    experts: dict[str, int] = {}  # our name -> how many there are
    for name in {_split(p.name)[1] for pieces in (found.pieces, *found.cut) for p in pieces}:
        if (row := expert_row(name)) is not None:
            experts[named(name)] = max(experts.get(named(name), 0), row[1] + 1)

    def renamed(pieces: Iterable[StateTensor]) -> list[StateTensor]:
        return [piece for p in pieces for piece in _renamed(p, named(_split(p.name)[1]), experts)]

    run = dict(found.run)
    run["optimizer_params"] = [
        list(dict.fromkeys(map(named, names))) for names in run["optimizer_params"]
    ]
    return dataclasses.replace(
        found,
        pieces=renamed(found.pieces),
        cut=[renamed(pieces) for pieces in found.cut],
        shared={named(a): named(n) for a, n in found.shared.items() if named(a) != named(n)},
        frozen=list(dict.fromkeys(map(named, found.frozen))),
        run=run,
    )


def _split(state: str) -> tuple[str, str]:
    """("optimizer/exp_avg", "a.b") of "optimizer/exp_avg/a.b"."""
    parts = state.split("/", 2 if state.startswith("optimizer/") else 1)
    return "/".join(parts[:-1]), parts[-1]


def _renamed(piece: StateTensor, name: str, experts: dict[str, int]) -> Iterable[StateTensor]:
    kind, old = _split(piece.name)
    state = f"{kind}/{name}"
    row = expert_row(old)
    if row is None:
        yield dataclasses.replace(piece, name=state)
    # a counter, which is equal for all experts
    elif kind.startswith("optimizer/") and not piece.shape:
        if row[1] == 0:
            yield dataclasses.replace(piece, name=state)
    else:
        # An expert is a row of the stack, so its elements come after those of the experts before
        # it.
        shape = (experts[name], *piece.shape)
        before = row[1] * math.prod(piece.shape)
        yield dataclasses.replace(
            piece, name=state, shape=shape, start=piece.start + before, stop=piece.stop + before
        )
