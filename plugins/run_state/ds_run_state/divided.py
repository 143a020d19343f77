"""What a layer computes where ranks divide it, for whoever reads a model instead of calling it.

Slices (`ds_run_state.slices`) say which part of a parameter is here. This says what the part is
for: which inputs and outputs of the whole layer, and what makes its outputs whole again. A layer
declares it as the attribute `DIVIDED`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

DIVIDED = "ds_divided"
"""The attribute of a module: a `Divided`, or None while it is whole."""


@dataclass(frozen=True, slots=True)
class Divided:
    """This rank's part of a layer. An embedding is a layer whose inputs are tokens.

    rank, ranks: the place among those that divide it. inputs, outputs: (first, size) of the whole
    layer's that are this rank's; None: all. sums: outputs are summed over the ranks, then a bias is
    added. gathers: the ranks' outputs are put side by side; sizes: how many each rank has.
    whole_weight: the parameters are whole, and `outputs` are the rows that are used.
    """

    rank: int
    ranks: int
    inputs: Sequence[tuple[int, int]] | None = None
    outputs: Sequence[tuple[int, int]] | None = None
    sums: bool = False
    gathers: bool = False
    sizes: Sequence[int] = ()
    whole_weight: bool = False


def divided(module: Any) -> Divided | None:
    """What is here of `module`; None where it is whole."""
    found = getattr(module, DIVIDED, None)
    return found if isinstance(found, Divided) else None
