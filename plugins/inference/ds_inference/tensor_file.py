"""A file of safetensors that is read, not mapped: of a weight only the bytes that are wanted, into its own memory.

Through a mapping, what was read stays a part of the process beside the weights until the file is closed.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
from pathlib import Path
from typing import Any, BinaryIO

import torch
from ds_run_state.slices import Box, Slice
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ds_core.errors import CheckpointError

__all__ = ["TensorFile"]

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
CHUNK = 1 << 24
"""Bytes that are read at once of rows of which only some columns are wanted."""


class TensorFile:
    """The tensors of one file. CheckpointError for one that is damaged."""

    def __init__(self, path: Path, stack: contextlib.ExitStack) -> None:
        self._path = path
        try:
            with safe_open(path, framework="pt") as checked:  # looks at every number of the header
                checked.keys()
            self._file: BinaryIO = stack.enter_context(path.open("rb"))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} is no file of safetensors: {error}") from error
        length = int.from_bytes(self._file.read(8), "little")
        self._header = json.loads(self._file.read(length))
        self._header.pop("__metadata__", None)
        self._begin = 8 + length

    def keys(self) -> list[str]:
        """Every weight."""
        return list(self._header)

    def shape(self, name: str) -> tuple[int, ...]:
        """The whole weight's shape."""
        return tuple(self._header[name]["shape"])

    def read(self, name: str, piece: Slice | None = None) -> Tensor:
        """What `piece` keeps of a weight, or all of it."""
        entry = self._header[name]
        if entry["dtype"] not in DTYPES:
            raise CheckpointError(f"{self._path}: {name} has dtype {entry['dtype']}, which is not read")
        piece = Slice.of(self.shape(name)) if piece is None else piece
        out = torch.empty(piece.size, dtype=DTYPES[entry["dtype"]])
        first = self._begin + entry["data_offsets"][0]
        for part in piece.parts():
            index = tuple(slice(at, at + size) for at, size in zip(part.at, part.box.size, strict=True))
            self._read_box(first, piece.shape, part.box, out[index] if index else out)
        return out

    def _read_box(self, first: int, shape: tuple[int, ...], box: Box, out: Tensor) -> None:
        """Read a box of the tensor that begins at byte `first` into `out`, a view."""
        if not out.numel():
            return
        inner = math.prod(shape[1:]) * out.element_size()
        begin, rows = (box.first[0], box.size[0]) if shape else (0, 1)
        if box.size[1:] == shape[1:] and out.is_contiguous():
            self._read_into(first + begin * inner, out)
            return
        index = (slice(None), *(slice(f, f + n) for f, n in zip(box.first[1:], box.size[1:], strict=True)))
        step = max(1, CHUNK // inner)
        for low in range(0, rows, step):
            high = min(low + step, rows)
            block = torch.empty((high - low, *shape[1:]), dtype=out.dtype)
            self._read_into(first + (begin + low) * inner, block)
            out[low:high] = block[index]

    def _read_into(self, at: int, out: Tensor) -> None:
        self._file.seek(at)
        bytes_of: Any = out.reshape(-1).view(torch.uint8).numpy()
        view = memoryview(bytes_of)
        for low in itertools.count(0, 1 << 30):
            if low >= len(view):
                return
            if self._file.readinto(view[low : low + (1 << 30)]) != min(1 << 30, len(view) - low):  # type: ignore[attr-defined]
                raise CheckpointError(f"{self._path} ends too early")
