"""Which weights are kept: masks of the largest values, of blocks, and of N out of M in a row.

A weight is seen as a matrix here, outputs times inputs; a convolution's inputs are channels times
kernel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


def largest(values: Tensor, ratio: float) -> Tensor:
    """True at the ceil(ratio * n) largest of n `values`; of equal ones, the first."""
    count = math.ceil(ratio * values.numel() - 1e-9)  # 0.1 * 30 is a little more than 3
    order = values.detach().reshape(-1).argsort(descending=True, stable=True)
    mask = torch.zeros(values.numel(), dtype=torch.bool, device=values.device)
    mask[order[:count]] = True
    return mask.view(values.shape)


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks of `outputs` times `inputs` weights are kept or pruned as a whole."""

    outputs: int
    inputs: int

    def fits(self, shape: tuple[int, int]) -> bool:
        """Whether a matrix of this shape can be cut into blocks."""
        return shape[0] % self.outputs == 0 and shape[1] % self.inputs == 0

    def mask(self, scores: Tensor, ratio: float) -> Tensor:
        """True for the weights of the blocks with the largest sums of `scores`."""
        rows, columns = scores.shape
        blocks = scores.view(
            rows // self.outputs, self.outputs, columns // self.inputs, self.inputs
        ).sum((1, 3))
        kept = largest(blocks, ratio)
        return kept.repeat_interleave(self.outputs, 0).repeat_interleave(self.inputs, 1)


@dataclass(frozen=True, slots=True)
class PerRow:
    """`pruned` of each `of` weights in a row are pruned (2:4 is what GPUs calculate faster
    with)."""

    pruned: int
    of: int

    def fits(self, shape: tuple[int, int]) -> bool:
        """Whether rows of this length can be cut into groups."""
        return shape[1] % self.of == 0

    def mask(self, scores: Tensor, ratio: float) -> Tensor:
        """False for the weights with the least `scores` of each group.

        ratio: 1 prunes none and 1 - pruned / of (or less) all that it should; between them fewer of
        each group.
        """
        count = min(self.pruned, round((1 - ratio) * self.of))
        groups = scores.reshape(-1, self.of)
        order = groups.argsort(dim=1, stable=True)
        mask = torch.ones_like(groups, dtype=torch.bool)
        mask.scatter_(1, order[:, :count], False)
        return mask.view(scores.shape)


Pattern = Blocks | PerRow


def parse_pattern(text: str) -> Pattern:
    """``"4x1"`` or ``"2:4"``, which the config has checked."""
    if ":" in text:
        pruned, of = text.split(":")
        return PerRow(int(pruned), int(of))
    outputs, inputs = text.split("x")
    return Blocks(int(outputs), int(inputs))
