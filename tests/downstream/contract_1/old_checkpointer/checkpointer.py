"""A checkpointer on torch.distributed.checkpoint (DCP): tensors in its safetensors storage, values in JSON beside it.

DCP's own metadata would be pickled, so each rank's JSON says which pieces of which states it wrote.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from ds_checkpoint.collective_errors import on_every_rank, on_first_rank
from ds_checkpoint.values import decode, encode
from ds_run_state import RunState, SavedRun
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

from ds_core.checkpointer import Checkpointer, Folder, Loaded, LoadOptions, SaveOptions
from ds_core.errors import UsageError

if TYPE_CHECKING:
    from ds_core.running import RunningEngine


class OldCheckpointer(Checkpointer):
    """`RunState` is the record of all that there is to save; what fails on one rank fails on all."""

    def save(self, engine: RunningEngine, folder: Folder, options: SaveOptions) -> None:
        """A folder ``folder/tag``."""
        run, path = RunState(engine), Path(folder) / options.tag
        on_first_rank(f"cannot make {path}", lambda: path.mkdir(parents=True))
        on_every_rank(f"cannot save to {path}", lambda: write(run, path, options))
        if options.save_latest:
            on_first_rank(f"{path} is not the latest", lambda: path.with_name("latest").write_text(path.name))

    def load(self, engine: RunningEngine, folder: Folder, options: LoadOptions) -> Loaded:
        """What the tag names, or was saved last."""
        latest = Path(folder) / "latest"
        if options.tag is None and not on_first_rank(f"cannot look for {latest}", latest.is_file):
            return None, {} if options.missing_ok else None
        run, path = RunState(engine), Path(folder) / (options.tag or latest.read_text())
        saved, client = on_every_rank(f"cannot load {path}", lambda: read(run, States(path), options))[0]
        on_every_rank(f"loading {path} stopped half-way", lambda: run.restore(saved, options))
        return str(path), {} if options.module_only else client


def write(run: RunState, path: Path, options: SaveOptions) -> None:
    """This rank's pieces of states, and its values."""
    excluded = run.frozen_states() if options.exclude_frozen_parameters else []
    pieces = {f"pieces/{run.rank}/{i}": piece for i, piece in enumerate(run.pieces(exclude=excluded))}
    if cut := [piece.name for piece in pieces.values() if piece.box or piece.held]:
        raise UsageError(f"{cut[0]} is cut along other axes than dp, which this checkpointer does not support")
    tensors: dict[str, Tensor] = {}
    values = [run.common(), run.local(), dict(options.client_state or {})]
    row = {
        "values": encode(values, f"values/{run.rank}", tensors, own=True),
        "excluded": excluded,
        "pieces": {key: [p.name, p.shape, p.start, p.stop] for key, p in pieces.items()},
    }
    tensors |= {key: p.values().detach().reshape(-1) for key, p in pieces.items()}
    writer = HuggingFaceStorageWriter(str(path), dict.fromkeys(tensors, run.rank + 1), save_distributed=True)
    save_tensors(tensors, storage_writer=writer, no_dist=True)
    (path / f"{run.rank:05d}.json").write_text(json.dumps(row))


def read(run: RunState, states: States, options: LoadOptions) -> tuple[SavedRun, Any]:
    """The checkpoint as `RunState.restore` takes it, and the client's state. Nothing of the run has changed yet."""
    own, excluded = run.rank < len(states.rows), states.rows[0]["excluded"]
    run.check(states, options, excluded=excluded)
    ranks = (states.rows[0], states.rows[run.rank if own else 0])
    (common, _, client), (_, local, _) = (decode(row["values"], states.tensor, "values") for row in ranks)
    return SavedRun(states, common, local, own, len(states.rows), partial=bool(excluded)), client


class States:
    """The states of a checkpoint, by name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows = [json.loads(file.read_text()) for file in sorted(path.glob("*.json"))]
        self.pieces: dict[str, list[tuple[int, int, str]]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for key, (name, shape, start, stop) in (item for row in self.rows for item in row["pieces"].items()):
            self.pieces.setdefault(name, []).append((start, stop, key))
            self.shapes[name] = tuple(shape)
        self.metadata: Any = HuggingFaceStorageReader(str(path)).read_metadata().state_dict_metadata

    def names(self) -> Sequence[str]:
        """Of all states."""
        return list(self.shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a whole state."""
        return self.shapes[name]

    def tensor(self, key: str) -> Tensor:
        """One tensor as it was written."""
        out = {key: torch.empty(self.metadata[key].size, dtype=self.metadata[key].properties.dtype)}
        load_tensors(out, storage_reader=HuggingFaceStorageReader(str(self.path)), no_dist=True)
        return out[key]

    def read(self, name: str, start: int = 0, stop: int | None = None, *, into: object = None) -> Tensor:
        """A range of the flattened state, put together from the pieces that it lies in."""
        stop = math.prod(self.shapes[name]) if stop is None else stop
        pieces = sorted(self.pieces[name])
        found = [piece for piece in pieces if piece[0] < stop and start < piece[1]] or pieces[:1]
        return torch.cat([self.tensor(key)[max(start - first, 0) : stop - first] for first, _, key in found])
