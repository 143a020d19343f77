"""The formats ``dcp`` and ``megatron``."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from pathlib import Path

from ds_checkpoint.folder.format import check_tag
from ds_checkpoint.formats.foreign import (
    CheckpointFormat,
    ForeignCheckpoint,
    Written,
    refuse_split,
)
from ds_checkpoint.offline import Saved
from ds_run_state.opening import read_small

from ds_checkpoint_dcp import megatron
from ds_checkpoint_dcp.reading import is_dcp, open_dcp
from ds_checkpoint_dcp.writing import fsdp_items, new_folder, rank_states, write_records
from ds_core.errors import CheckpointError

_STEP = re.compile(r"(?:step|epoch|iter|checkpoint)[-_=]?(\d{1,15})", re.ASCII)
_ITERATION = re.compile(r"\d{1,7}", re.ASCII)


class Dcp(CheckpointFormat):
    """Folders of torch.distributed.checkpoint: FSDP2's and torchtitan's among them."""

    def find(self, path: Path, tag: str | None) -> Path | None:
        """A folder with ``.metadata``; above several, as ``step-100``, the one of the last step."""
        if tag is not None or is_dcp(path):
            path = path if tag is None else path / check_tag(tag)
            return path if is_dcp(path) and not megatron.is_megatron(path) else None
        if not path.is_dir():
            return None
        steps = [(int(m[1]), p) for p in path.iterdir() if (m := _STEP.fullmatch(p.name))]
        fit = [(n, p) for n, p in steps if is_dcp(p) and not megatron.is_megatron(p)]
        return max(fit)[1] if fit else None

    def open(self, path: Path) -> AbstractContextManager[ForeignCheckpoint]:
        """See `CheckpointFormat`."""
        return open_dcp(path)

    def write(self, saved: Saved, output: Path) -> Written:
        """The folder `output`, as `dcp.load` takes it."""
        refuse_split(saved, "torch.distributed.checkpoint")
        left = rank_states(saved)
        with new_folder(output) as folder:
            write_records(folder, fsdp_items(saved, left))
        return Written(output, tuple(left))


class Megatron(CheckpointFormat):
    """Folders of Megatron-core's ``torch_dist``."""

    def find(self, path: Path, tag: str | None) -> Path | None:
        """A folder with ``metadata.json`` and ``common.pt``; above several, the one that
        ``latest_checkpointed_iteration.txt`` names.
        """
        place = path if tag is None else path / check_tag(tag)
        if tag is None and (path / megatron.LATEST).is_file():
            text = read_small(path / megatron.LATEST, 64).decode("ascii", "replace").strip()
            if text != "release" and not _ITERATION.fullmatch(text):
                raise CheckpointError(f"{path / megatron.LATEST} names no iteration: {text!r}")
            place = path / ("release" if text == "release" else f"iter_{int(text):07d}")
        return place if megatron.is_megatron(place) else None

    def open(self, path: Path) -> AbstractContextManager[ForeignCheckpoint]:
        """See `CheckpointFormat`."""
        return megatron.open_megatron(path)

    def write(self, saved: Saved, output: Path) -> Written:
        """``output/iter_0000100`` of the 100th step, and the file that names it."""
        refuse_split(saved, "torch_dist")
        return megatron.write_megatron(saved, output)
