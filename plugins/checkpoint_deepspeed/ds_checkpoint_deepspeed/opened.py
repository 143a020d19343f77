"""One way to look into checkpoints of ds_core and of DeepSpeed: a `Saved`, whose states of
DeepSpeed's are mapped from its files, not read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from ds_checkpoint.formats.foreign import ForeignCheckpoint, Piece
from ds_checkpoint.offline import Saved, open_saved
from ds_checkpoint.storages.finding import is_url
from ds_run_state.states import StateTensor
from torch import Tensor

from ds_checkpoint_deepspeed.reading.deepspeed import read_deepspeed
from ds_checkpoint_deepspeed.reading.folder import find_deepspeed
from ds_checkpoint_deepspeed.reading.foreign import Foreign


@contextlib.contextmanager
def open_any(
    path: str | Path, tag: str | None = None, *, our_names: bool = False
) -> Iterator[Saved]:
    """Open a checkpoint: `path` itself, ``path/tag``, or what ``path/latest`` names;
    CheckpointError if it is none.

    our_names: DeepSpeed's weights get the names that ds_core's modules have, else they keep
    DeepSpeed's.
    """
    # DeepSpeed's files are on a disk; what a URL names is a checkpoint of ds_core.
    folder = None if is_url(path) else find_deepspeed(Path(path), tag)
    if folder is None:
        with open_saved(path, tag) as saved:
            yield saved
        return
    yield as_foreign(folder, read_deepspeed(folder, our_names=our_names)).saved()


def as_foreign(folder: Path, found: Foreign) -> ForeignCheckpoint:
    """What was read, as every format gives it."""
    pieces = [_piece(piece, {}) for piece in found.pieces]
    for rank, cut in enumerate(found.cut):
        pieces += [_piece(piece, {"tp": rank}) for piece in cut]
    return ForeignCheckpoint(
        folder,
        found.tag,
        pieces,
        found.run,
        found.client,
        found.optimizer,
        found.frozen,
        found.shared,
        found.missing,
        {"tp": len(found.cut)} if found.cut else {},
    )


def _piece(piece: StateTensor, place: dict[str, int]) -> Piece:
    def read(start: int, out: Tensor) -> None:
        flat = piece.tensor.detach().reshape(-1)[start : start + out.numel()]
        out.copy_(flat if piece.read is None else piece.read(flat))

    at = {axis: place[axis] for axis in piece.held}
    dtype = piece.tensor.dtype
    return Piece(piece.name, piece.shape, dtype, read, piece.box, piece.start, piece.stop, at)
