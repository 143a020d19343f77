"""What a layer computes where ranks divide it, for whoever reads a model instead of calling it.

Slices (`ds_run_state.slices`) say which part of a parameter is here. This says what the part is
for: which inputs and outputs of the whole layer, and what makes its outputs whole again. A layer
declares it as the attribute `DIVIDED`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ds_core.context import StashKey

DIVIDED = "ds_divided"
"""The attribute of a module: a `Divided`, or None while it is whole."""

PositionsHere = Callable[[int], tuple[int, Sequence[tuple[int, int]]]]
"""Of a rank that has so many positions of a sequence: the length of the whole sequence, and (first,
size) of each stretch that is here.
"""

POSITIONS: StashKey[PositionsHere] = StashKey("positions")
"""Who divides sequences says here which positions a rank has."""


@dataclass(frozen=True, slots=True)
class Divided:
    """This rank's part of a layer. An embedding is a layer whose inputs are tokens."""

    # This rank's place among those that divide the layer, and how many they are.
    rank: int
    ranks: int
    # (first, size) of the full layer's inputs and outputs that are this rank's; None: all.
    inputs: Sequence[tuple[int, int]] | None = None
    outputs: Sequence[tuple[int, int]] | None = None
    # Outputs are summed over the ranks, then a bias is added.
    sums: bool = False
    # The ranks' outputs are put side by side; `sizes`: how many each rank has.
    gathers: bool = False
    sizes: Sequence[int] = ()
    # The parameters are full, and `outputs` are the rows that are used.
    whole_weight: bool = False


def divided(module: Any) -> Divided | None:
    """What is here of `module`; None where it is whole."""
    found = getattr(module, DIVIDED, None)
    return found if isinstance(found, Divided) else None
