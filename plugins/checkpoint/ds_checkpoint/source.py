"""The states of a saved checkpoint, as the ranks of another run read them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeGuard

import torch
from ds_run_state.slices import Slice, param_of
from torch import Tensor

from ds_checkpoint.folder.boxes import moves
from ds_checkpoint.folder.format import DAMAGED, Manifest, SavedState
from ds_checkpoint.folder.tensorfile import DTYPES, TensorFile
from ds_core.errors import CheckpointError

if TYPE_CHECKING:
    from ds_checkpoint.storages.contract import Stored
    from ds_core.mesh import Mesh

MOST_OPEN = 256
"""Files of a checkpoint that are open at once."""


class SavedStates:
    """The states of a checkpoint as this rank may read them: a `StateSource`.

    Files are opened when first needed, and only the requested bytes are read.
    mesh: None where no run is going on; then only states that are the same on all ranks have a
        name.
    slices: parameters of which this rank has a slice, so that its slice is what their names mean.
    """

    def __init__(
        self,
        stored: Stored,
        manifest: Manifest,
        mesh: Mesh | None,
        slices: Mapping[str, Slice] | None = None,
    ) -> None:
        self.path = stored.path
        self._stored = stored
        self.manifest = manifest
        self._slices = slices or {}
        self._files: dict[str, TensorFile] = {}
        # names of `_files` that are open, the least recently used first
        self._open: dict[str, None] = {}
        self._states = _readable(manifest, mesh)
        self._turn = mesh.rank if mesh is not None else 0

    def add_masters(self) -> None:
        """Let fp32 weights be their own master weights where the checkpoint has none.

        A run of 16 bits that loads a checkpoint of fp32 then starts from what was saved.
        """
        for name, state in list(self._states.items()):
            kind, _, param = name.partition("/")
            if kind == "module" and state.dtype == "F32":
                self._states.setdefault(f"master/{param}", state)

    @property
    def bytes_read(self) -> int:
        """Tensor data read so far, by this rank."""
        return sum(f.bytes_read for f in self._files.values())

    def names(self) -> Sequence[str]:
        """Every state that this rank may read."""
        return list(self._states)

    def shape(self, name: str) -> tuple[int, ...]:
        """The whole state's shape."""
        return self._slice(name).size

    def __contains__(self, name: object) -> bool:
        return name in self._states

    def dtype(self, name: str) -> str:
        """The state's dtype as safetensors spells it."""
        return self._state(name).dtype

    def read(
        self, name: str, start: int = 0, stop: int | None = None, *, into: object = None
    ) -> Tensor:
        """See `StateSource`.

        Fresh memory costs as much as reading: the system gives it out page by page.
        """
        state = self._state(name)
        piece = self._slice(name)
        shape = piece.size
        parts = list(piece.parts())
        stop = math.prod(shape) if stop is None else stop
        assert 0 <= start <= stop <= math.prod(shape), (
            f"range [{start}, {stop}) of {name!r}, which has {shape}"
        )
        dtype = DTYPES[state.dtype]
        if _can_hold(into, stop - start, dtype):
            out = into.detach().view(-1)
        else:
            out = torch.empty(stop - start, dtype=dtype)
        # Ranks that read the same begin with another file each, and find in the system's cache what
        # another has read.
        first = self._turn % len(state.chunks)
        # Chunks outside the requested range give no moves, so their file is not opened.
        for chunk in state.chunks[first:] + state.chunks[:first]:
            held = (chunk.start, chunk.stop)
            for box, at in parts:
                for move in moves(
                    chunk.within(state.shape), held, box, (start, stop), at=at, within=shape
                ):
                    self.file(chunk.file).read_move(chunk.key, move, out)
        return out

    def whole(self, name: str) -> Tensor:
        """The whole state in its shape."""
        return self.read(name).view(self.shape(name))

    def _slice(self, name: str) -> Slice:
        """What of a stored state this rank's parameter has.

        Of one that bears its name at other coordinates too, there may be less than the whole that
        the slice tells of.
        """
        stored = self._state(name)
        piece = self._slices.get(param_of(name))
        whole = Slice.of(stored.shape)
        if piece is None or len(stored.shape) != len(piece.shape):
            return whole
        # The stored state has the full parameter's shape: this rank's ranges of it. Where a state
        # was saved per coordinate (`at`), a dimension may already have this rank's size: all of it
        # then.
        dims = list(zip(stored.shape, piece.shape, piece.size, piece.ranges, strict=True))
        if stored.shape == piece.shape or (
            stored.at and all(s in (n, size) for s, n, size, _ in dims)
        ):
            return Slice(
                stored.shape, tuple(r if s == n else ((0, s),) for s, n, _, r in dims), piece.axes
            )
        return whole

    def _state(self, name: str) -> SavedState:
        if name not in self._states:
            raise CheckpointError(
                f"{self.path} has no state {name!r}; was it saved by another model?"
            )
        return self._states[name]

    def file(self, name: str) -> TensorFile:
        """One of the checkpoint's files, opened, and known to belong to this checkpoint."""
        if name not in self._files:
            # Files of different saves can have the names of one checkpoint after folders were
            # copied together.
            file = TensorFile(self._stored.open(name))
            if (
                file.metadata.get("save_id") != self.manifest.save_id
                or file.metadata.get("file") != name
            ):
                found = ", ".join(
                    f"{k} {file.metadata[k]!r}" for k in ("file", "step") if k in file.metadata
                )
                file.close()
                raise CheckpointError(
                    f"{file.path} is not of this checkpoint ({found or 'no metadata'}); {DAMAGED}"
                )
            self._files[name] = file
        # The file becomes the one that was used last.
        self._open.pop(name, None)
        self._open[name] = None
        # a checkpoint of many ranks has more files than a process may open
        if len(self._open) > MOST_OPEN:
            oldest = next(iter(self._open))
            del self._open[oldest]
            self._files[oldest].close()
        return self._files[name]

    def check_files(self) -> None:
        """CheckpointError unless every file is there, has its size, and holds the tensors that the
        manifest says.
        """
        for name, mark in self.manifest.files.items():
            self._stored.check_file(name, mark.size)
            self.file(name)
        # The headers are those of the manifest: a wrong one is found before the run is changed.
        for state in self.manifest.states:
            for chunk in state.chunks:
                found = self.file(chunk.file).tensors.get(chunk.key)
                want = (DTYPES.get(state.dtype), (chunk.stop - chunk.start,))
                if found is None or found[:2] != want:
                    raise CheckpointError(
                        f"{self._stored.path_of(chunk.file)} does not hold {chunk.key!r} as the manifest "
                        f"describes it; {DAMAGED}"
                    )

    def verify(self, rank: int, world_size: int) -> None:
        """CheckpointError unless every file is, byte for byte, as it was written; ranks divide the
        files.

        Files of version 1 have no checksum and are taken as they are.
        """
        marks = self.manifest.files
        # The largest goes to the rank that has read least; every rank computes the same assignment.
        load = [0] * world_size
        for name in sorted(marks, key=lambda n: (-marks[n].size, n)):
            reader = load.index(min(load))
            load[reader] += marks[name].size
            if reader == rank and marks[name].checksum not in (None, self.file(name).checksum()):
                raise CheckpointError(
                    f"{self._stored.path_of(name)} is not as it was written: its checksum is wrong; "
                    f"{DAMAGED}"
                )

    def close(self) -> None:
        """Close all files."""
        for file in self._files.values():
            file.close()


def _can_hold(into: object, count: int, dtype: torch.dtype) -> TypeGuard[Tensor]:
    """Whether `into` is a tensor whose memory can be read into."""
    if not isinstance(into, Tensor) or into.dtype != dtype or into.numel() != count:
        return False
    # One that is made of other tensors has no memory of its own.
    if hasattr(into, "__tensor_flatten__"):
        return False
    return into.is_cpu and into.is_contiguous() and not into.is_quantized


def _readable(manifest: Manifest, mesh: Mesh | None) -> dict[str, SavedState]:
    """The state that each name means on this rank.

    A name that only one set of coordinates holds means the same everywhere. Of several, this rank's
    own is read; that makes sense only while the axes are as long as they were.
    """
    by_name: dict[str, list[SavedState]] = {}
    for state in manifest.states:
        by_name.setdefault(state.name, []).append(state)
    found: dict[str, SavedState] = {}
    # The sizes of this run's axes.
    here = mesh.describe() if mesh is not None else {}
    for name, variants in by_name.items():
        if len(variants) == 1:
            found[name] = variants[0]
            continue
        # Without a run there is no coordinate to choose by.
        if mesh is None:
            continue
        for axis in sorted({a for v in variants for a in v.at}):
            if here.get(axis, 1) != manifest.mesh.get(axis, 1):
                raise CheckpointError(
                    f"state {name!r} differs along mesh axis {axis!r}, of size "
                    f"{manifest.mesh.get(axis, 1)} when "
                    f"it was saved and {here.get(axis, 1)} now; load with the same size"
                )
        for state in variants:
            if all(mesh.coord[axis] == index for axis, index in state.at.items()):
                found[name] = state
    return found
