"""One way to look into checkpoints of ds_core and of DeepSpeed: a `Saved`, whose states of
DeepSpeed's are in memory (mapped from its files, not read)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ds_checkpoint.folder.boxes import Move
from ds_checkpoint.folder.format import COMMON, Manifest
from ds_checkpoint.folder.layout import items_of, merge, rows_of
from ds_checkpoint.folder.tensorfile import carry
from ds_checkpoint.folder.values import decode
from ds_checkpoint.offline import Saved, open_saved
from ds_checkpoint.source import SavedStates
from ds_checkpoint.storages.disk import DiskCheckpoint
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
    yield _as_saved(folder, read_deepspeed(folder, our_names=our_names))


def run_values(saved: Saved) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the run's values, the client state)."""
    if isinstance(saved.source, _States):
        return saved.source.found.run, saved.source.found.client

    def tensor(key: str) -> Tensor:
        file = saved.source.file(COMMON)
        return file.read(key).view(file.tensors[key][1])

    run, client = (
        decode(v, tensor, str(saved.path)) for v in (saved.manifest.run, saved.manifest.client)
    )
    return run, client


class _Held:
    """Pieces of states in memory, as a `TensorFile` gives them."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors

    def read_move(self, key: str, move: Move, out: Tensor) -> None:
        """See `TensorFile.read_move`."""
        carry(move, self._tensors[key], out)

    def close(self) -> None:
        """Nothing is open."""


class _States(SavedStates):
    """The states of a foreign checkpoint."""

    def __init__(
        self, path: Path, manifest: Manifest, found: Foreign, held: dict[str, _Held]
    ) -> None:
        super().__init__(DiskCheckpoint(path), manifest, None)
        self.found = found
        self._held = held

    def file(self, name: str) -> Any:
        """The pieces of one rank."""
        return self._held[name]


def _as_saved(folder: Path, found: Foreign) -> Saved:
    ranks: dict[str, tuple[list[StateTensor], dict[str, int]]] = {"all": (found.pieces, {})}
    ranks |= {f"tp{r}": (pieces, {"tp": r}) for r, pieces in enumerate(found.cut)}
    rows = [row for name, (pieces, coord) in ranks.items() for row in rows_of(pieces, coord, name)]
    manifest = Manifest(
        save_id="",
        tag=found.tag,
        step=found.run["global_steps"],
        serial=0,
        world_size=max(len(found.cut), 1),
        mesh={"tp": len(found.cut)} if found.cut else {},
        versions={},
        plugins={},
        config=None,
        optimizer=found.optimizer,
        files={},
        states=merge(rows),
        shared=found.shared,
        excluded=(),
        frozen=tuple(found.frozen),
        module_extra={},
        run=None,
        client=None,
    )
    held = {
        name: _Held({item[0]: item[3]() for item in items_of(pieces)})
        for name, (pieces, _) in ranks.items()
    }
    source = _States(folder, manifest, found, held)
    split = {s.name.removeprefix("module/") for s in manifest.states if s.name not in source}
    return Saved(folder, manifest, source, tuple(sorted(split)))
