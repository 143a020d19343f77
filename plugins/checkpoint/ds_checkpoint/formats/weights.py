"""Safetensors in the layout of Hugging Face's `save_pretrained`: weights, with ``config.json``
beside them.

Files that torch.distributed.checkpoint wrote with ``HuggingFaceStorageWriter`` are read too: each
holds boxes of weights, and says in its metadata where they begin.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ds_run_state.opening import open_plain, parse_json, read_small
from ds_run_state.slices import Box

from ds_checkpoint.folder.format import check_name, check_tag
from ds_checkpoint.folder.tensorfile import TensorFile
from ds_checkpoint.formats.foreign import CheckpointFormat, ForeignCheckpoint, Piece, Written
from ds_checkpoint.offline import Saved, check_output, export_weights
from ds_core.errors import CheckpointError

INDEX = "model.safetensors.index.json"
_ONE = "model.safetensors"
_SHARD = re.compile(r"shard-\d+-model-\d+-of-\d+\.safetensors", re.ASCII)
_SHARDING = "DCP_SHARDING_INFO"
_BESIDE = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
_MOST_BESIDE = 1 << 27
LACKS = (
    "safetensors files hold weights alone: optimizer states, counters, the schedule and the client "
    "state start again"
)


class Safetensors(CheckpointFormat):
    """The format ``safetensors``."""

    def find(self, path: Path, tag: str | None) -> Path | None:
        """A folder with ``model.safetensors``, its index or shards; an index; or a file."""
        place = path if tag is None else path / check_tag(tag)
        if place.is_dir():
            names = os.listdir(place)
            known = _ONE in names or INDEX in names or any(map(_SHARD.fullmatch, names))
            return place if known else None
        named = place.suffix == ".safetensors" or place.name.endswith(".safetensors.index.json")
        return place if named and place.is_file() else None

    @contextlib.contextmanager
    def open(self, path: Path) -> Iterator[ForeignCheckpoint]:
        """See `CheckpointFormat`; `path` may be a file of weights too."""
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context(contextlib.closing(TensorFile(p))) for p in files_of(path)]
            yield _opened(path, files)

    def write(self, saved: Saved, output: Path) -> Written:
        """See `CheckpointFormat`. Weights keep their dtype; a folder of weights gives its
        ``config.json`` and tokenizer along.
        """
        check_output(output, False)
        export_weights(saved, output, dtype="saved")
        if isinstance(saved.path, Path) and saved.path.is_dir() and saved.values is not None:
            copy_config(saved.path, output)
        has_more = len(saved.source.names()) > len(saved.weights())
        return Written(output, (LACKS,) if has_more or saved.manifest.step else ())


def _opened(path: Path, files: list[TensorFile]) -> ForeignCheckpoint:
    offsets = {id(file): _offsets(file) for file in files}
    shapes: dict[str, tuple[int, ...]] = {}
    # The whole of a weight that files hold boxes of ends where the last box does.
    for file in files:
        for name, (_, size, _, _) in file.tensors.items():
            begin = offsets[id(file)].get(name, (0,) * len(size))
            if len(begin) != len(size):
                raise CheckpointError(
                    f"{file.path}: {name!r} begins in another number of dimensions"
                )
            end = tuple(b + n for b, n in zip(begin, size, strict=True))
            before = shapes.get(name, end)
            if len(before) != len(end):
                raise CheckpointError(
                    f"{file.path}: {name!r} has another number of dimensions there"
                )
            shapes[name] = tuple(map(max, before, end))
    pieces = []
    shared: dict[str, str] = {}
    for file in files:
        for name, (dtype, size, _, _) in file.tensors.items():
            begin = offsets[id(file)].get(name, (0,) * len(size))
            box = None if size == shapes[name] else Box(tuple(begin), size)
            read = partial(file.read_into, name)
            pieces.append(Piece(f"module/{check_name(name)}", shapes[name], dtype, read, box))
        shared |= {a: n for a, n in file.metadata.items() if n in file.tensors}
    shared = {a: n for a, n in shared.items() if a not in shapes}
    return ForeignCheckpoint(path, "imported", pieces, shared=shared, missing=(LACKS,))


def _offsets(file: TensorFile) -> Mapping[str, tuple[int, ...]]:
    """Where the boxes begin that the file's tensors are."""
    text = file.metadata.get(_SHARDING)
    if text is None:
        return {}
    try:
        rows = parse_json(text.encode(), 1 << 22)
        found = {name: tuple(row["saved_offsets"]) for name, row in rows.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file.path}: its {_SHARDING} cannot be read: {error}") from error
    for name, begin in found.items():
        if not all(type(n) is int and 0 <= n < 1 << 62 for n in begin):
            raise CheckpointError(f"{file.path}: its {_SHARDING} gives {name!r} impossible offsets")
    return found


def files_of(path: Path) -> list[Path]:
    """The files of weights at `path`: a file, an index, or a folder with one of them."""
    if path.name.endswith(INDEX):
        return _of_index(path)
    if not path.is_dir():
        return [path]
    if os.path.lexists(path / INDEX):
        return _of_index(path / INDEX)
    if os.path.lexists(path / _ONE):
        return [path / _ONE]
    return sorted(path / name for name in os.listdir(path) if _SHARD.fullmatch(name))


def _of_index(index: Path) -> list[Path]:
    try:
        rows: Any = parse_json(read_small(index, 1 << 27), 1 << 23)
        names = sorted(set(rows["weight_map"].values()))
    except FileNotFoundError:
        raise CheckpointError(f"{index} does not exist") from None
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{index} is not an index of safetensors files: {error}") from error
    if bad := [n for n in names if Path(n).name != n or not n.endswith(".safetensors")]:
        raise CheckpointError(
            f"{index} names {bad[0]!r}, which is not a safetensors file next to it"
        )
    return [index.parent / name for name in names]


def copy_config(source: Path, output: Path) -> list[Path]:
    """Copy ``config.json`` and the tokenizer's files of a folder (or one such file) beside the
    weights in `output`; what is there already is kept. The files that were copied.
    """
    paths = [source / name for name in _BESIDE] if source.is_dir() else [source]
    done = []
    for path in paths:
        target = output / ("config.json" if path == source else path.name)
        if not os.path.lexists(path) or os.path.lexists(target):
            continue
        descriptor, size = open_plain(path)
        with open(descriptor, "rb") as old:
            if size > _MOST_BESIDE:
                raise CheckpointError(f"{path} has {size} bytes; {_MOST_BESIDE} are the most")
            if target.name == "config.json":
                _check_json(path, old.read())
                old.seek(0)
            with open(target, "xb") as new:
                shutil.copyfileobj(old, new, 1 << 20)
        done.append(target)
    return done


def _check_json(path: Path, text: bytes) -> None:
    try:
        if not isinstance(json.loads(text), dict):
            raise ValueError("no object")
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not a config.json: {error}") from error
