"""What a format gives of a checkpoint of another program, and what it is given to write one.

A format describes states by pieces: boxes or ranges of them, each with a function that reads a
range. What is made of them reads like a checkpoint of ours, at any layout, a range at a time.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from ds_run_state.slices import Box, Slice
from torch import Tensor

from ds_checkpoint.folder.boxes import Move
from ds_checkpoint.folder.format import Manifest
from ds_checkpoint.folder.layout import merge
from ds_checkpoint.folder.tensorfile import dtype_name, read_moved
from ds_checkpoint.offline import Saved
from ds_checkpoint.source import SavedStates
from ds_checkpoint.storages.disk import DiskCheckpoint
from ds_core.errors import CheckpointError

if TYPE_CHECKING:
    from ds_core.mesh import Mesh

Read = Callable[[int, Tensor], None]
"""``read(start, out)`` fills `out`, a contiguous 1-d CPU tensor of the piece's dtype, from element
`start` of the piece on, counted in its row-major flattened box or state.
"""

GROUP_KEYS = (
    "lr",
    "initial_lr",
    "betas",
    "eps",
    "weight_decay",
    "momentum",
    "dampening",
    "nesterov",
    "amsgrad",
    "maximize",
    "lr_decay",
    "alpha",
    "centered",
)
"""Hyperparameters of an optimizer's group that mean the same in every program. What chooses an
implementation (``fused``, ``foreach``) is this run's own.
"""


def new_run() -> dict[str, Any]:
    """The run's values (`ds_run_state.RunState.common`) where a checkpoint has none of them."""
    return {
        **dict.fromkeys(("micro_steps", "global_steps", "global_samples", "skipped_steps"), 0),
        "scaler": None,
        "optimizer_groups": [],
        "optimizer_params": [],
        "lr_scheduler": None,
        "data": None,
    }


def no_rank_values() -> dict[str, Any]:
    """What belongs to one rank alone, where a checkpoint has nothing of it."""
    return {"random": None, "plugins": {}, "module_extra": {}, "optimizer": {}}


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of one state, as it is stored."""

    # ``module/<name>``, ``master/<name>`` or ``optimizer/<key>/<name>``.
    state: str
    # Of the whole state.
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Read
    # The part; None: all of it.
    box: Box | None = None
    # The range of the row-major flattened box that is stored; stop None: to its end.
    start: int = 0
    stop: int | None = None
    # Coordinates on mesh axes along which other states bear the same name.
    at: Mapping[str, int] = field(default_factory=dict)
    # Raises CheckpointError, which names the file, where the stored bytes are damaged.
    check: Callable[[], None] | None = None

    def _row(self, key: int) -> dict[str, Any]:
        """What a manifest says of it."""
        count = math.prod(self.shape) if self.box is None else self.box.numel
        stop = count if self.stop is None else self.stop
        return {
            "name": self.state,
            "at": dict(self.at),
            "shape": list(self.shape),
            "dtype": dtype_name(self.dtype, self.state),
            "chunk": [_FILE, str(key), self.start, stop],
            "box": None if self.box is None else [self.box.first, self.box.size],
        }


_FILE = "pieces"


@dataclass(frozen=True, slots=True)
class ForeignCheckpoint:
    """A checkpoint of another program, opened."""

    # Its folder or file.
    path: Path
    # What to call it where it gets a name.
    tag: str
    pieces: Sequence[Piece]
    # The run's values and the program's, as a checkpoint of ours has them.
    run: dict[str, Any] = field(default_factory=new_run)
    client: dict[str, Any] = field(default_factory=dict)
    # Whose states they are, as ``program:class``; None without any.
    optimizer: str | None = None
    # Names of weights that are not trained.
    frozen: Sequence[str] = ()
    # Further name -> name, of weights that modules share.
    shared: Mapping[str, str] = field(default_factory=dict)
    # What the format has no place for, or what could not be read, and why; said once.
    missing: Sequence[str] = ()
    # Sizes of the axes in `Piece.at`.
    mesh: Mapping[str, int] = field(default_factory=dict)

    def manifest(self) -> Manifest:
        """The manifest that it would have; CheckpointError unless its pieces cover each state once."""
        try:
            states = merge(piece._row(key) for key, piece in enumerate(self.pieces))
        except CheckpointError as error:
            raise CheckpointError(f"{self.path}: {error}") from None
        return Manifest(
            save_id="",
            tag=self.tag,
            step=int(self.run["global_steps"]),
            serial=0,
            world_size=max(math.prod(self.mesh.values()), 1),
            mesh=dict(self.mesh),
            versions={},
            plugins={},
            config=None,
            optimizer=self.optimizer,
            files={},
            states=states,
            shared=dict(self.shared),
            excluded=(),
            frozen=tuple(self.frozen),
            module_extra={},
            run=None,
            client=None,
        )

    def saved(self) -> Saved:
        """It as checkpoints of ours look without a run."""
        source = ForeignStates(self)
        manifest = source.manifest
        split = {s.name.removeprefix("module/") for s in manifest.states if s.name not in source}
        return Saved(
            self.path,
            manifest,
            source,
            tuple(sorted(split)),
            (self.run, self.client),
            tuple(self.missing),
        )


class ForeignStates(SavedStates):
    """The states of a foreign checkpoint, as a rank of a run (`mesh`, `slices`) reads them, or
    nobody's.

    stack: what is left when it is closed.
    """

    def __init__(
        self,
        found: ForeignCheckpoint,
        mesh: Mesh | None = None,
        slices: Mapping[str, Slice] | None = None,
    ) -> None:
        super().__init__(DiskCheckpoint(found.path), found.manifest(), mesh, slices)
        self.found = found
        self.stack = ExitStack()
        self._pieces = _Pieces(found.pieces)

    @property
    def bytes_read(self) -> int:
        """See `SavedStates`."""
        return self._pieces.bytes_read

    def file(self, name: str) -> Any:
        """What reads the pieces."""
        return self._pieces

    def check_files(self) -> None:
        """The format has looked at them when it opened the checkpoint."""

    def verify(self, rank: int, world_size: int) -> None:
        """Compare what is stored with its checksums, where the format has any; ranks divide it."""
        for piece in self.found.pieces[rank::world_size]:
            if piece.check is not None:
                piece.check()

    def close(self) -> None:
        """See `SavedStates`."""
        self.stack.close()


class _Pieces:
    """Pieces by number, read as a `TensorFile` is."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._pieces = pieces
        self.bytes_read = 0

    def read_move(self, key: str, move: Move, out: Tensor) -> None:
        """See `TensorFile.read_move`."""

        piece = self._pieces[int(key)]

        def read(start: int, into: Tensor) -> None:
            piece.read(start, into)
            self.bytes_read += into.nbytes

        read_moved(read, move, out)


def in_memory(tensor: Tensor) -> Read:
    """What reads from a tensor in memory, or mapped from a file."""
    flat = tensor.detach().reshape(-1)

    def read(start: int, out: Tensor) -> None:
        out.copy_(flat[start : start + out.numel()])

    return read


@dataclass(frozen=True, slots=True)
class Written:
    """What a format wrote: its path, and what it had no place for."""

    path: Path | str
    missing: tuple[str, ...] = ()


class CheckpointFormat(ABC):
    """A form in which another program keeps checkpoints.

    Files are untrusted: no code in them may run, their sizes bound what is made of them, links are
    not followed, and what is wrong is a CheckpointError that names the file.
    """

    @abstractmethod
    def find(self, path: Path, tag: str | None) -> Path | None:
        """The checkpoint at `path` (itself, ``path/tag``, or what that program takes as the latest
        below it); None: there is none of this format. It reads names, and no more than a small
        file.
        """

    @abstractmethod
    def open(self, path: Path) -> AbstractContextManager[ForeignCheckpoint]:
        """Open what `find` has found, for as long as the context lasts.

        Tensor data is read when a `Piece` is asked for it.
        """

    @abstractmethod
    def write(self, saved: Saved, output: Path) -> Written:
        """Write `saved` so that the other program reads it from `output`; at most one state is in
        memory. What was at `output` before is left alone: CheckpointError where it is in the way.
        """


def some_states(saved: Saved, prefixes: Iterable[str]) -> list[str]:
    """The names of `saved`'s states that begin with one of `prefixes`."""
    wanted = tuple(prefixes)
    return [name for name in saved.source.names() if name.startswith(wanted)]


def refuse_split(saved: Saved, program: str) -> None:
    """CheckpointError where weights differ along mesh axes, so that they have no one value."""
    if saved.split:
        raise CheckpointError(
            f"{saved.path}: {', '.join(saved.split[:3])} differ along mesh axes; {program} has no "
            "form for that"
        )
