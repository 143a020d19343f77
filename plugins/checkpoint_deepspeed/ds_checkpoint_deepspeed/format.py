"""DeepSpeed's checkpoints as the format ``deepspeed``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from ds_checkpoint.formats.foreign import CheckpointFormat, ForeignCheckpoint, Written
from ds_checkpoint.offline import Saved

from ds_checkpoint_deepspeed.exporting import write_universal
from ds_checkpoint_deepspeed.opened import as_foreign
from ds_checkpoint_deepspeed.reading.deepspeed import read_deepspeed
from ds_checkpoint_deepspeed.reading.folder import find_deepspeed

_RANKS = "random states, the data position and plugins' states are left out, as DeepSpeed has none"


class DeepSpeed(CheckpointFormat):
    """Folders that DeepSpeed wrote; what is written is a universal checkpoint."""

    def find(self, path: Path, tag: str | None) -> Path | None:
        """The folder itself, ``path/tag``, or what its ``latest`` names."""
        return find_deepspeed(path, tag)

    @contextlib.contextmanager
    def open(self, path: Path) -> Iterator[ForeignCheckpoint]:
        """See `CheckpointFormat`. Weights have the names that ds_core's modules give them."""
        yield as_foreign(path, read_deepspeed(path, our_names=True))

    def write(self, saved: Saved, output: Path) -> Written:
        """The universal checkpoint `output`, for stages 1 to 3 and any number of ranks."""
        return Written(write_universal(saved, output), (_RANKS,) if saved.values is None else ())
