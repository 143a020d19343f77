"""What one expert computes, for all local experts at once.

A preset names one of these functions, or its own: ``function(rows, weights, act, product)``, which
returns [rows, hidden].

rows: [rows, hidden] of all local experts, those of one expert together.
weights: ``w1``, ``w2`` and, where gate and up are apart, ``w3``; other parameters of the experts
    under their own names; each [local experts, ...].
act: the activation.
product: ``product(rows, weight)``, with a weight of [local experts, out, in], multiplies each row
    by its expert's; ``product.spread(values)`` gives each row its expert's, from [local experts,
    out].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from torch import Tensor


class Product(Protocol):
    """Multiplies the rows of each expert by that expert's weight."""

    def __call__(self, rows: Tensor, weight: Tensor) -> Tensor:
        """[rows, in] by [local experts, out, in] -> [rows, out]."""

    def spread(self, values: Tensor) -> Tensor:
        """[local experts, out] -> [rows, out]."""


def gated(
    rows: Tensor, weights: Mapping[str, Tensor], act: Callable[[Tensor], Tensor], product: Product
) -> Tensor:
    """``down(act(gate(x)) * up(x))``, the expert of every family that has a preset here."""
    if "w3" in weights:
        gate = product(rows, weights["w1"])
        up = product(rows, weights["w3"])
    else:
        # Gate and up in one weight: one product for both.
        gate, up = product(rows, weights["w1"]).chunk(2, dim=-1)
    return product(act(gate) * up, weights["w2"])
