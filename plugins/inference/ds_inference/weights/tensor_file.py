"""A file of safetensors that is read, not mapped: of a weight only the parts that are wanted, into
its own memory.

Through a mapping, what was read stays a part of the process beside the weights until the file is
closed.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch
from ds_checkpoint.folder import tensorfile
from ds_checkpoint.folder.boxes import moves
from ds_run_state.slices import Box, Slice
from torch import Tensor


class TensorFile:
    """The weights of one file. CheckpointError for one that is damaged."""

    def __init__(self, path: Path, stack: contextlib.ExitStack) -> None:
        self._file = tensorfile.TensorFile(path, links=True)  # a hub's cache has links to its files
        stack.callback(self._file.close)

    def keys(self) -> list[str]:
        """Every weight."""
        return list(self._file.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """The whole weight's shape."""
        return self._file.tensors[name][1]

    def read(self, name: str, piece: Slice | None = None) -> Tensor:
        """What `piece` keeps of a weight, or all of it."""
        dtype, shape, _, _ = self._file.tensors[name]
        piece = Slice.of(shape) if piece is None else piece
        out = torch.empty(piece.size, dtype=dtype)
        whole = Box.whole(shape)
        flat = out.view(-1)
        # A slice is of several boxes; each is read in runs that are contiguous in the file, right
        # into its place.
        for part in piece.parts():
            wanted = (0, out.numel())
            for move in moves(
                whole, (0, whole.numel), part.box, wanted, at=part.at, within=piece.size
            ):
                self._file.read_move(name, move, flat)
        return out
