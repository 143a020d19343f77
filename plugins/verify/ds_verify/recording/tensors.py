"""Takes samples of tensors into the record: activations, and slices and shards of parameters."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from ds_run_state.slices import SLICES, unslice
from ds_run_state.states import StateTensor
from torch import Tensor

from ds_verify.recording.records import Entry, StepWriter
from ds_verify.recording.sampling import sample_box, sample_range

if TYPE_CHECKING:
    from ds_core.context import Context

Place = tuple[int, int]
"""A micro-batch: its number in the step, and the data-parallel index of who sees it."""

WHOLE_STEP: Place = (0, 0)
"""The place of what belongs to no micro-batch."""


class Tensors:
    """Samples what one rank has, and collects it until the step is written.

    limit: tensors with more elements are sampled.
    """

    def __init__(self, ctx: Context, folder: Path, limit: int) -> None:
        self._ctx = ctx
        self._limit = limit
        self.writer = StepWriter(folder)

    def activation(
        self, kind: str, name: str, tensor: Tensor, place: Place, order: int, factor: float = 1.0
    ) -> None:
        """An activation or its gradient, over `factor`: what this rank has counts as all of it."""
        values, first = sample_range(tensor, 0, tensor.numel(), self._limit)
        values = divided(values, factor)
        shape = tuple(tensor.shape)
        self.writer.add(
            Entry(kind, name, shape, name_of(tensor.dtype), first, *place, order), values
        )

    def local(
        self,
        kind: str,
        name: str,
        tensor: Tensor,
        order: int,
        place: Place = WHOLE_STEP,
        factor: float = 1.0,
    ) -> None:
        """A tensor of the local shape of a parameter, over `factor`."""
        shape = tuple(tensor.shape)
        piece = StateTensor(f"module/{name}", tensor, shape, 0, tensor.numel(), (), True)
        self.part(kind, name, piece, order, place, factor)

    def part(
        self,
        kind: str,
        name: str,
        piece: StateTensor,
        order: int,
        place: Place = WHOLE_STEP,
        factor: float = 1.0,
    ) -> None:
        """A part of a parameter or its gradient, over `factor`; slices are placed in the full one."""
        for found in unslice([piece], self._ctx.stash.get(SLICES), self._ctx.mesh):
            self.placed(kind, name, found, order, place, factor)

    def placed(
        self,
        kind: str,
        name: str,
        piece: StateTensor,
        order: int,
        place: Place = WHOLE_STEP,
        factor: float = 1.0,
    ) -> None:
        """The same of a part that knows its place in the full tensor."""
        values = piece.values()
        places = None
        first = -1
        if piece.box is None:
            numel = math.prod(piece.shape)
            found, first = sample_range(values, piece.start, numel, self._limit)
        else:
            found, places = sample_box(values, piece.start, piece.box, piece.shape, self._limit)
        entry = Entry(kind, name, piece.shape, name_of(values.dtype), first, *place, order)
        self.writer.add(entry, divided(found, factor), places)


def name_of(dtype: torch.dtype) -> str:
    """As torch has it, without "torch."."""
    return str(dtype).removeprefix("torch.")


def divided(values: Tensor, factor: float) -> Tensor:
    """`values` by `factor`, in fp32 at least where that could round."""
    if factor == 1.0:
        return values.clone() if values.device.type != "cpu" else values
    wide = values.float() if values.dtype.itemsize < 4 else values
    return wide / factor
