"""Weights in files, by name: any box of any weight can be read without the rest.

Nothing is unpickled.

What can be opened: a folder of Hugging Face's (safetensors, or ``.bin`` files, which torch reads
with ``weights_only=True``), one such file, a JSON file that lists files, what `save_parts` wrote,
and a checkpoint of dscore-checkpoint's.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ds_run_state.opening import parse_json, read_small
from ds_run_state.slices import Slice
from ds_run_state.torch_files import read_torch_file
from torch import Tensor

from ds_core.entries import resolve
from ds_core.errors import CheckpointError, DSError
from ds_inference.weights.tensor_file import TensorFile

PARTS = "ds_inference.parts"
"""The ``type`` of a JSON file that `save_parts` wrote."""
# What is looked for in a folder, in this order of preference.
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_FILES = ("model.safetensors", "pytorch_model.bin")
_LISTS = ("ds_inference_config.json", "checkpoints.json")
# Bounds on files that come from elsewhere, before they fill the memory.
_MAX_JSON = 1 << 27
_MAX_VALUES = 1 << 23


class Source(Protocol):
    """Weights by name."""

    where: str

    def names(self) -> Sequence[str]:
        """Every weight."""

    def shape(self, name: str) -> tuple[int, ...]:
        """The whole weight's shape."""

    def read(self, name: str, piece: Slice | None = None) -> Tensor:
        """What `piece` keeps of a weight, or all of it; the caller's own."""


@contextlib.contextmanager
def open_weights(given: str | Mapping[str, Any], root: str = "") -> Iterator[Source]:
    """Open weights.

    given: a path, below `root` if it is relative, or the contents of a JSON file that lists files.

    Of a JSON file that is there as `given` says, the files that it lists are below `root`.

    Raises CheckpointError, which names the file and the fix.
    """
    with contextlib.ExitStack() as stack:
        try:
            if isinstance(given, Mapping):
                source = _open_list(given, Path(root or "."), "the dict given as checkpoint", stack)
            elif (
                root
                and given.endswith(".json")
                and not given.endswith(".index.json")
                and os.path.isfile(given)
            ):
                source = _open_list(_json(Path(given)), Path(root), given, stack)
            else:
                source = _open(Path(root, given), stack)
        except RecursionError:
            raise CheckpointError(
                f"{str(given)[:200]}: its lists of files name each other"
            ) from None
        yield source


def _open(path: Path, stack: contextlib.ExitStack) -> Source:
    if not os.path.lexists(path):
        raise CheckpointError(
            f"there is no {path}; checkpoint names a folder, a file of weights or a JSON file of "
            "files"
        )
    if path.is_dir():
        return _folder(path, stack)
    if path.name.endswith(".index.json"):
        return _Files(_read_index(path), str(path), stack)
    if path.suffix == ".json":
        return _open_list(_json(path), path.parent, str(path), stack)
    return _Files([path], str(path), stack)


def _folder(path: Path, stack: contextlib.ExitStack) -> Source:
    # A list comes first: it may name files of the same folder, in an order of its own.
    for name in _LISTS:
        if (path / name).is_file():
            return _open_list(_json(path / name), path, str(path / name), stack)
    for name in _INDEXES:
        if (path / name).is_file():
            return _Files(_read_index(path / name), str(path), stack)
    for name in _FILES:
        if (path / name).is_file():
            return _Files([path / name], str(path), stack)
    # A training run's checkpoint has files that are no weights by themselves.
    if (path / "latest").is_file() or (path / "manifest.json").is_file():
        return _Checkpoint(path, stack)
    if found := sorted(path.glob("*.safetensors")):
        return _Files(found, str(path), stack)
    raise CheckpointError(
        f"{path} holds no weights: no {', '.join(_FILES + _INDEXES + _LISTS)}, no *.safetensors, "
        "and no checkpoint"
    )


def _json(path: Path) -> dict[str, Any]:
    try:
        found = parse_json(read_small(path, _MAX_JSON, links=True), _MAX_VALUES)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(
            f"{path} holds a {type(found).__name__}; an object with the key 'checkpoints' is "
            "expected"
        )
    return found


def _read_index(path: Path) -> list[Path]:
    files = _json(path).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(f, str) for f in files.values()):
        raise CheckpointError(f"{path} has no weight_map of file names")
    if bad := [name for name in files.values() if os.path.isabs(name)]:
        raise CheckpointError(f"{path} names {bad[0]!r}: files are next to their index")
    return [_below(path.parent, name, str(path)) for name in dict.fromkeys(files.values())]


def _below(folder: Path, name: object, origin: str) -> Path:
    """A file that a list names: it lies where the list says, and nowhere outside when that is
    relative.
    """
    if not isinstance(name, str) or not name:
        raise CheckpointError(f"{origin}: {name!r} is no file name")
    # A list from elsewhere must not read files outside of its folder by a relative path.
    if not os.path.isabs(name) and ".." in Path(name).parts:
        raise CheckpointError(f"{origin}: {name!r} leads out of its folder")
    return folder / name


def _open_list(
    data: Mapping[str, Any], folder: Path, origin: str, stack: contextlib.ExitStack
) -> Source:
    """DeepSpeed's JSON: type, checkpoints (a list, or lists by kind), version, base_dir,
    tp_size."""
    if data.get("type") == PARTS:
        return _Parts(data, folder, origin, stack)
    root = _below(folder, data.get("base_dir") or ".", origin)
    listed = data.get("checkpoints")
    if isinstance(listed, Mapping):
        if listed.get("tp") and (data.get("tp_size", 1), data.get("mp_size", 1)) != (1, 1):
            raise CheckpointError(
                f"{origin}: weights that DeepSpeed cut for ranks are not read, as it does not say "
                "where it cut; give "
                "the model's own checkpoint"
            )
        listed = [name for kind in ("non_tp", "tp") for name in listed.get(kind) or ()]
    if isinstance(listed, str):
        return _open(_below(root, listed, origin), stack)
    if not isinstance(listed, Sequence) or not listed:
        raise CheckpointError(f"{origin}: the key 'checkpoints' is to be a list of files")
    if str(data.get("type", "")).lower() in ("megatron", "ds_megatron") and len(listed) > 1:
        raise CheckpointError(
            f"{origin}: {data.get('type')} checkpoints in {len(listed)} parts are not merged; "
            "convert them to Hugging "
            "Face's form"
        )
    return _Files([_below(root, name, origin) for name in listed], origin, stack)


# -- kinds of sources ------------------------------------------------------------------------------


class _Files:
    """Whole weights in files of safetensors, or of torch's."""

    def __init__(self, files: Sequence[Path], where: str, stack: contextlib.ExitStack) -> None:
        self.where = where
        # Weight -> its file; of a name that several files have, the last counts.
        self._home: dict[str, TensorFile | _Pickled] = {}
        for path in files:
            opened = _open_file(path, stack)
            self._home |= dict.fromkeys(opened.keys(), opened)

    def names(self) -> Sequence[str]:
        """See `Source`."""
        return list(self._home)

    def shape(self, name: str) -> tuple[int, ...]:
        """See `Source`."""
        return self._home[name].shape(name)

    def read(self, name: str, piece: Slice | None = None) -> Tensor:
        """See `Source`."""
        return self._home[name].read(name, piece)


def _open_file(path: Path, stack: contextlib.ExitStack) -> TensorFile | _Pickled:
    if not path.is_file():
        raise CheckpointError(f"there is no file {path}")
    return TensorFile(path, stack) if path.suffix == ".safetensors" else _Pickled(path)


class _Pickled:
    """A file of `torch.save`, of which tensors only are taken; it is mapped, not read."""

    def __init__(self, path: Path) -> None:
        found = read_torch_file(path, links=True)  # a hub's cache has links to its files
        # DeepSpeed's own files keep the weights below this key.
        if isinstance(found, dict) and isinstance(found.get("module"), dict):
            found = found["module"]
        if not isinstance(found, dict):
            raise CheckpointError(f"{path} holds a {type(found).__name__}, not weights by name")
        self._weights = {k: v for k, v in found.items() if isinstance(v, Tensor)}

    def keys(self) -> list[str]:
        """Every weight."""
        return list(self._weights)

    def shape(self, name: str) -> tuple[int, ...]:
        """See `Source`."""
        return tuple(self._weights[name].shape)

    def read(self, name: str, piece: Slice | None = None) -> Tensor:
        """See `Source`."""
        whole = self._weights[name].detach()
        return (whole if piece is None else piece.take(whole)).clone()


class _Parts:
    """What ranks saved of their parts: a file of each rank, and JSON that says which part of a
    weight is where.
    """

    def __init__(
        self, data: Mapping[str, Any], folder: Path, origin: str, stack: contextlib.ExitStack
    ) -> None:
        self.where = origin
        try:
            self._files = [
                _open_file(_below(folder, name, origin), stack) for name in data["checkpoints"]
            ]
            self._shapes = {
                name: tuple(map(int, entry["shape"])) for name, entry in data["weights"].items()
            }
            self._parts = {
                name: [_read_part(self._shapes[name], p) for p in e["parts"]]
                for name, e in data["weights"].items()
            }
            # Before room is made for a weight: the shape in the list may be of any size.
            held = [
                n
                for n, parts in self._parts.items()
                if _count_kept(parts) < math.prod(self._shapes[n])
            ]
            for name, parts in self._parts.items():
                for file, stored in parts:
                    if (
                        file not in range(len(self._files))
                        or self._files[file].shape(name) != stored.size
                    ):
                        raise ValueError(f"no file has the part {stored.ranges} of {name}")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{origin} is damaged: {type(error).__name__} {error}") from error
        if held:
            raise CheckpointError(f"{origin} is damaged: nobody has {held[0]}, or all of it")

    def names(self) -> Sequence[str]:
        return list(self._parts)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def read(self, name: str, piece: Slice | None = None) -> Tensor:
        wanted = piece.ranges if piece is not None else Slice.of(self._shapes[name]).ranges
        for file, stored in self._parts[name]:
            # Divided as when it was saved: one part is the answer, and the full weight is never
            # made.
            if stored.ranges == wanted:
                return self._files[file].read(name)
        whole = None
        filled = 0
        for file, stored in self._parts[name]:
            own = self._files[file].read(name)
            whole = own.new_empty(self._shapes[name]) if whole is None else whole
            # Each part of what this file has, put in its place of the full weight.
            for part in stored.parts():
                local = tuple(
                    slice(at, at + n) for at, n in zip(part.at, part.box.size, strict=True)
                )
                whole[part.box.slices()] = own[local]
                filled += part.box.numel
        if whole is None or filled < math.prod(self._shapes[name]):
            raise CheckpointError(f"{self.where} is damaged: a part of {name} is nowhere")
        return whole if piece is None else piece.take(whole)


def _count_kept(parts: Sequence[tuple[int, Slice]]) -> int:
    return sum(math.prod(stored.size) for _, stored in parts)


def _read_part(shape: tuple[int, ...], part: Mapping[str, Any]) -> tuple[int, Slice]:
    ranges = tuple(
        tuple((int(first), int(size)) for first, size in entry) for entry in part["ranges"]
    )
    if len(ranges) != len(shape) or any(
        f < 0 or f + n > s for r, s in zip(ranges, shape, strict=True) for f, n in r
    ):
        raise ValueError(f"ranges {ranges} of shape {shape}")
    return int(part["file"]), Slice(shape, ranges, ())


class _Checkpoint:
    """A checkpoint of a training run, through dscore-checkpoint: its weights in the run's best
    precision.
    """

    def __init__(self, path: Path, stack: contextlib.ExitStack) -> None:
        self.where = str(path)
        try:
            opening = resolve("ds_checkpoint:open_saved")
        except (DSError, ImportError) as error:
            raise CheckpointError(
                f"{path} is a checkpoint of a training run; install dscore-checkpoint, or write its "
                "weights with "
                "dscore checkpoint export"
            ) from error
        # By reference: dscore-checkpoint need not be installed for other sources.
        self._saved = stack.enter_context(opening(path))
        if self._saved.split:
            raise CheckpointError(
                f"{path}: {self._saved.split[0]} has other values on other ranks; export the "
                "weights as the run does"
            )

    def names(self) -> Sequence[str]:
        found: list[str] = self._saved.weights()
        return found

    def shape(self, name: str) -> tuple[int, ...]:
        found: tuple[int, ...] = self._saved.source.shape(f"module/{name}")
        return found

    def read(self, name: str, piece: Slice | None = None) -> Tensor:
        whole: Tensor = self._saved.source.whole(self._saved.best(name))
        return whole if piece is None else piece.take(whole)
