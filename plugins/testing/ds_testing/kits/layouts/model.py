"""The kit's model: its loss is a sum over elements of parameters, so that any part of them can be
trained without the others.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from ds_run_state.slices import Slice

WIDTH = 6
INNER = 10
EXPERTS = 4


class Experts(nn.Module):
    """A stack of matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(EXPERTS, 5, 3))


class Layer(nn.Module):
    """Parameters of every kind, under usual names."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up_proj = nn.Linear(WIDTH, INNER)
        self.down_proj = nn.Linear(INNER, WIDTH)
        self.experts = Experts()
        for param in self.norm.parameters():
            nn.init.normal_(param)


class CutModel(nn.Module):
    """Two layers and a table.

    Each element w of a parameter adds cos(a w + b), where a and b are a micro-batch's.
    """

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.layers = nn.ModuleDict({"0": Layer(), "1": Layer()})
            self.tied = nn.Embedding(9, WIDTH)
        # What this rank has of parameters that are cut.
        self.pieces: dict[str, Slice] = {}

    def cuts(self, name: str) -> Iterator[tuple[str, int]]:
        """The axes that cut a parameter, each with the dimension."""
        if "up_proj" in name:
            yield "tp", 0
        if "down_proj.weight" in name:
            yield "tp", 1
        if "experts" in name:
            yield "ep", 0

    def forward(self, step: int, place: int, others: Sequence[int]) -> Tensor:
        """The loss of a micro-batch; experts see those of their neighbours, `others`, too."""
        total: Tensor = torch.zeros((), dtype=next(self.parameters()).dtype)
        for name, param in self.named_parameters():
            for at in others if "experts" in name else [place]:
                total = total + self._loss(name, param, step, at)
        return total

    def _loss(self, name: str, param: Tensor, step: int, place: int) -> Tensor:
        piece = self.pieces.get(name)
        shape = tuple(param.shape) if piece is None else piece.shape
        seed = zlib.crc32(f"{name} {step} {place}".encode())
        make = torch.Generator().manual_seed(seed)
        data = torch.randn(2, *shape, generator=make, dtype=torch.float64)
        a, b = (x if piece is None else piece.take(x) for x in data)
        return torch.cos(param * a.to(param) + b.to(param)).sum() * 0.1
