"""A checkpoint format of somebody else: a folder with ``shelf.json``, which lists tensors, and a
file of plain bytes for each.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import torch
from ds_checkpoint.folder.tensorfile import DTYPES, as_bytes
from ds_checkpoint.formats.entry import FormatEntry
from ds_checkpoint.formats.foreign import (
    CheckpointFormat,
    ForeignCheckpoint,
    Piece,
    Written,
    refuse_split,
)
from ds_checkpoint.offline import Saved
from ds_run_state.opening import open_plain, parse_json, read_small
from torch import Tensor

from ds_core.errors import CheckpointError

LACKS = "a shelf holds weights alone"


def ds_checkpoint_formats() -> Mapping[str, FormatEntry]:
    """Name -> format."""
    return {"shelf": FormatEntry("shelf_format:Shelf", "weights")}


class Shelf(CheckpointFormat):
    """Weights, one file each."""

    def find(self, path: Path, tag: str | None) -> Path | None:
        """A folder with a list."""
        place = path if tag is None else path / tag
        return place if (place / "shelf.json").is_file() else None

    @contextlib.contextmanager
    def open(self, path: Path) -> Iterator[ForeignCheckpoint]:
        """The list is read and compared with the files; the bytes are read when they are wanted."""
        pieces = []
        try:
            rows = parse_json(read_small(path / "shelf.json", 1 << 24), 1 << 20)
            for number, (name, (dtype, shape)) in enumerate(rows.items()):
                file = path / f"{number}.bin"
                size = file.lstat().st_size
                if size != math.prod(shape) * DTYPES[dtype].itemsize:
                    raise CheckpointError(f"{file} has {size} bytes, which is not {shape} {dtype}")
                read = partial(_read, file)
                pieces.append(Piece(f"module/{name}", tuple(shape), DTYPES[dtype], read))
        except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
            raise CheckpointError(f"{path} is no shelf: {error}") from error
        yield ForeignCheckpoint(path, "shelf", pieces, missing=(LACKS,))

    def write(self, saved: Saved, output: Path) -> Written:
        """The list comes last: without it there is no checkpoint."""
        refuse_split(saved, "a shelf")
        if output.exists():
            raise CheckpointError(f"{output} is there already")
        output.mkdir(parents=True)
        rows = {}
        for number, name in enumerate(saved.weights()):
            state = f"module/{name}"
            rows[name] = [saved.source.dtype(state), list(saved.source.shape(state))]
            (output / f"{number}.bin").write_bytes(as_bytes(saved.source.whole(state)))
        (output / "shelf.json").write_text(json.dumps(rows))
        return Written(output, (LACKS,))


def _read(file: Path, start: int, out: Tensor) -> None:
    with open(open_plain(file)[0], "rb") as opened:
        opened.seek(start * out.itemsize)
        data = opened.read(out.nbytes)
    if len(data) != out.nbytes:
        raise CheckpointError(f"{file} was cut off")
    if data:
        out.copy_(torch.frombuffer(bytearray(data), dtype=out.dtype))
