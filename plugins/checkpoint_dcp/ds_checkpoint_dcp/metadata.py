"""``.metadata``: which tensors and values a checkpoint of torch.distributed.checkpoint has, and where.

The file is a pickle of torch's own classes. It is read as data (`pickles`), and what is found becomes
the dataclasses here; a name that no such file has is an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from ds_run_state.opening import read_small
from ds_run_state.slices import Box

from ds_checkpoint_dcp.pickles import MOST_BYTES, Global, Made, read_pickle
from ds_core.errors import CheckpointError

METADATA = ".metadata"
_TORCH = "torch.distributed.checkpoint."
_SHARD = "torch.distributed._shard.sharded_tensor.metadata."
_MEGATRON = "megatron.core.dist_checkpointing.strategies."
_CLASSES = frozenset(
    (
        *(
            f"{_TORCH}metadata.{name}"
            for name in (
                "Metadata",
                "TensorStorageMetadata",
                "BytesStorageMetadata",
                "TensorProperties",
                "ChunkStorageMetadata",
                "MetadataIndex",
                "StorageMeta",
                "_MEM_FORMAT_ENCODING",
            )
        ),
        f"{_TORCH}filesystem._StorageInfo",
        f"{_TORCH}filesystem._StoragePrefix",
        f"{_SHARD}TensorProperties",
        f"{_SHARD}MEM_FORMAT_ENCODING",
        f"{_MEGATRON}torch.MCoreMetadata",
        f"{_MEGATRON}torch.MCoreSavePlan",
        "torch.Size",
        "torch.serialization._get_layout",
        "collections.OrderedDict",
        "pathlib.PosixPath",
        "pathlib.WindowsPath",
        "pathlib.PurePosixPath",
        "pathlib._local.PosixPath",
        "pathlib._local.WindowsPath",
    )
)
_DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
_MOST_DIMS = 64
_MOST_SIZE = 1 << 62

KeyPath = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of the checkpoint: the boxes in which it is stored, each once."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a record is: the bytes [offset, offset + length) of a file beside ``.metadata``."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Metadata:
    """What a checkpoint has.

    tensors, values: by their flat name.
    places: (name, where a box begins; None for a value) -> its record.
    paths: name -> the keys that lead to it in the state dict that was saved.
    """

    tensors: Mapping[str, StoredTensor]
    values: tuple[str, ...]
    places: Mapping[tuple[str, tuple[int, ...] | None], Place]
    paths: Mapping[str, KeyPath]


def read_metadata(folder: Path) -> Metadata:
    """Read ``folder/.metadata``; CheckpointError, which names it, for anything that is wrong."""
    path = folder / METADATA
    try:
        data = read_small(path, MOST_BYTES)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing; copy all files of the checkpoint") from None
    found = read_pickle(data, str(path), lambda name: name in _CLASSES or name in _DTYPES)
    try:
        return _metadata(found)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError) as error:
        raise CheckpointError(
            f"{path} is not as torch.distributed.checkpoint writes it "
            f"({type(error).__name__}: {str(error)[:200]}); copy it again"
        ) from error


def _metadata(found: Any) -> Metadata:
    if not isinstance(found, Made) or _last(found) not in ("Metadata", "MCoreMetadata"):
        raise ValueError("it describes no Metadata")
    fields = found.state
    tensors: dict[str, StoredTensor] = {}
    values: list[str] = []
    for name, entry in _dict(fields["state_dict_metadata"]).items():
        if not isinstance(name, str):
            raise ValueError(f"a tensor is called {name!r}")
        if _last(entry) == "TensorStorageMetadata":
            tensors[name] = _tensor(name, entry.state)
        elif _last(entry) == "BytesStorageMetadata":
            values.append(name)
        else:
            raise ValueError(f"{name!r} is a {_last(entry)}")
    places = dict(_places(_dict(fields["storage_data"]), tensors))
    _refuse_overlaps(places)
    missing = [n for n, t in tensors.items() if any((n, b.first) not in places for b in t.boxes)]
    if missing or any((name, None) not in places for name in values):
        lost = (missing or [n for n in values if (n, None) not in places])[0]
        raise ValueError(f"{lost!r} is stored nowhere")
    paths = {n: _path(p) for n, p in _dict(fields.get("planner_data") or {}).items()}
    return Metadata(tensors, tuple(values), places, {n: p for n, p in paths.items() if p})


def _last(made: Any) -> str:
    """The name of the class, without its module."""
    return made.kind.name.rpartition(".")[2] if isinstance(made, Made) else type(made).__name__


def _dict(value: Any) -> dict[Any, Any]:
    if isinstance(value, Made) and _last(value) == "OrderedDict":
        return dict(value.items)
    if not isinstance(value, dict):
        raise TypeError(f"a {type(value).__name__} where a dict is to be")
    return value


def _path(value: Any) -> KeyPath:
    """The keys of a state dict that lead to a value; () for what is none."""
    fits = isinstance(value, tuple) and all(isinstance(key, str | int) for key in value)
    return value if fits else ()


def _size(value: Any) -> tuple[int, ...]:
    if isinstance(value, Made) and value.kind.name == "torch.Size":
        value = value.args[0] if value.args else ()
    found = tuple(value)
    fits = all(type(n) is int and 0 <= n < _MOST_SIZE for n in found)
    if not fits or len(found) > _MOST_DIMS:
        raise ValueError(f"the sizes {str(found)[:100]}")
    count = 1
    for n in found:
        count *= n
    if count >= _MOST_SIZE:
        raise ValueError(f"the sizes {str(found)[:100]}")
    return found


def _tensor(name: str, fields: Mapping[str, Any]) -> StoredTensor:
    shape = _size(fields["size"])
    boxes = []
    for chunk in fields["chunks"]:
        if _last(chunk) != "ChunkStorageMetadata":
            raise ValueError(f"a chunk of {name!r} is a {_last(chunk)}")
        box = Box(_size(chunk.state["offsets"]), _size(chunk.state["sizes"]))
        if not box.inside(shape):
            raise ValueError(
                f"a chunk of {name!r} begins at {box.first} with {box.size}, beyond the shape {shape}"
            )
        boxes.append(box)
    # Ranks that have nothing of a tensor give boxes without elements; one of them is enough, and
    # none where others have elements.
    filled = [box for box in boxes if box.numel] or boxes[:1]
    if not filled:
        raise ValueError(f"{name!r} has no chunks")
    return StoredTensor(_dtype(name, fields["properties"]), shape, tuple(filled))


def _dtype(name: str, properties: Any) -> torch.dtype:
    """Of `TensorProperties`, whose state is a tuple that begins with it, or a dict."""
    state = properties.state
    value = state["dtype"] if isinstance(state, dict) else state[0]
    if not isinstance(value, Global) or value.name not in _DTYPES:
        raise ValueError(f"the dtype of {name!r}")
    return _DTYPES[value.name]


def _places(
    rows: Mapping[Any, Any], tensors: Mapping[str, StoredTensor]
) -> Iterable[tuple[tuple[str, tuple[int, ...] | None], Place]]:
    for index, info in rows.items():
        if _last(index) != "MetadataIndex" or _last(info) != "_StorageInfo":
            raise ValueError(f"{_last(index)} is stored at a {_last(info)}")
        name = index.state["fqn"]
        offset = index.state.get("offset")
        begin = None if offset is None else _size(offset)
        # A tensor without dimensions has one box, which begins at ().
        if begin is None and name in tensors:
            begin = (0,) * len(tensors[name].shape)
        yield (name, begin), _place(name, info.state)


def _place(name: str, fields: Mapping[str, Any]) -> Place:
    file = fields["relative_path"]
    if not isinstance(file, str) or not file or Path(file).name != file or "\0" in file:
        raise ValueError(f"{name!r} is in {str(file)[:100]!r}, which is no file beside .metadata")
    place = (fields["offset"], fields["length"])
    if not all(type(n) is int and 0 <= n < _MOST_SIZE for n in place):
        raise ValueError(f"{name!r} is at the bytes {place}")
    if fields.get("transform_descriptors"):
        raise ValueError(
            f"{name!r} was transformed when it was written "
            f"({str(fields['transform_descriptors'])[:100]}), which cannot be read"
        )
    return Place(file, *place)


def _refuse_overlaps(places: Mapping[Any, Place]) -> None:
    """Two records in the same bytes would let a small file stand for tensors of any size."""
    end = 0
    before = ""
    for place, name in sorted(((p.file, p.offset, p.length), key[0]) for key, p in places.items()):
        file, offset, length = place
        if file == before and offset < end and length:
            raise ValueError(f"the record of {name!r} in {file} overlaps with another")
        end = offset + length if file != before else max(end, offset + length)
        before = file
