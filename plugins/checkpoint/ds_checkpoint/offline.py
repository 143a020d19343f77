"""Checkpoints without an engine: look into them, verify, compare, export as plain weights.

Everything streams: one state, or a piece of it, is in memory at a time.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ds_checkpoint.folder import files
from ds_checkpoint.folder.format import LATEST, MANIFEST, Manifest
from ds_checkpoint.folder.tensorfile import DTYPES, Item, write_tensors
from ds_checkpoint.source import SavedStates
from ds_checkpoint.storages.contract import Stored
from ds_checkpoint.storages.finding import check_path, open_storage
from ds_core.errors import CheckpointError

log = logging.getLogger("ds_checkpoint")

EXPORT_DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "saved": None,
}
_BLOCK = 1 << 24
_INDEX = "model.safetensors.index.json"
_WEIGHTS = re.compile(r"model(-\d{5,}-of-\d{5,})?\.safetensors(\.index\.json)?", re.ASCII)
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12} | {
    f"{letter}IB": 1 << (10 * power) for power, letter in enumerate("KMGT", 1)
}


@dataclass(frozen=True, slots=True)
class Saved:
    """An opened checkpoint."""

    path: Path | str
    manifest: Manifest
    source: SavedStates
    # Weights that differ along mesh axes, so that they have no one value.
    split: tuple[str, ...]
    # The run's and the program's values, where it is another program's; None: in the manifest.
    values: tuple[dict[str, Any], dict[str, Any]] | None = None
    # What of it could not be taken over, and why.
    missing: tuple[str, ...] = ()

    def weights(self) -> list[str]:
        """Names of module tensors (without ``module/``), in the order of the manifest."""
        return [n.removeprefix("module/") for n in self.source.names() if n.startswith("module/")]

    def best(self, name: str) -> str:
        """The state with the most exact values of weight `name`: its fp32 master where there is
        one.
        """
        master = f"master/{name}"
        return master if master in self.source else f"module/{name}"


@contextlib.contextmanager
def open_saved(path: str | Path, tag: str | None = None) -> Iterator[Saved]:
    """Open ``path`` (a checkpoint), ``path/tag``, or what ``path/latest`` names.

    path: a folder, or a URL.

    CheckpointError if it is none of these.
    """
    stored = _find(path, tag)
    manifest = stored.manifest()
    source = SavedStates(stored, manifest, None)
    try:
        source.check_files()
        split = {s.name.removeprefix("module/") for s in manifest.states if s.name not in source}
        yield Saved(stored.path, manifest, source, tuple(sorted(split)))
    finally:
        source.close()


def _find(path: str | Path, tag: str | None) -> Stored:
    storage = open_storage(path, "the checkpoint")
    if tag is not None:
        return storage.open(storage.find(tag))
    if (stored := storage.itself()) is not None:
        return stored
    latest = storage.latest() if storage.exists() else None
    if latest is None:
        have = storage.tags()
        hint = f"name one of {', '.join(have[:10])}" if have else "give the folder of a checkpoint"
        raise CheckpointError(
            f"{storage.path()} is no checkpoint and has no file {LATEST!r}; {hint}"
        )
    return storage.open(storage.find(latest))


def verify(path: str | Path, tag: str | None = None) -> Manifest:
    """Compare every file of a checkpoint with its checksum.

    CheckpointError names the first that differs.
    """
    with open_saved(path, tag) as saved:
        saved.source.verify(0, 1)
        return saved.manifest


# -- comparing -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Difference:
    """How one state differs: ``"only in the first"``, ``"only in the second"``, ``"shape"``,
    ``"dtype"``, ``"values"``.

    largest: the largest absolute difference of an element; NaN where one of them is not a number.
    """

    name: str
    kind: str
    detail: str
    largest: float | None = None


def differences(first: Saved, second: Saved) -> Iterator[Difference]:
    """What differs between the states of two checkpoints, in order of name; how they are cut into
    files does not.
    """
    one = set(first.source.names())
    two = set(second.source.names())
    for name in sorted(one | two):
        if name not in two:
            yield Difference(name, "only in the first", "")
        elif name not in one:
            yield Difference(name, "only in the second", "")
        elif first.source.shape(name) != second.source.shape(name):
            yield Difference(
                name, "shape", f"{first.source.shape(name)} and {second.source.shape(name)}"
            )
        elif (found := _compare(first.source, second.source, name)) is not None:
            yield found


def _compare(one: SavedStates, two: SavedStates, name: str) -> Difference | None:
    count = math.prod(one.shape(name))
    total = 0
    largest = 0.0
    dtypes = None
    for start in range(0, count, _BLOCK):
        a, b = (s.read(name, start, min(start + _BLOCK, count)) for s in (one, two))
        dtypes = (a.dtype, b.dtype)
        same = (a == b) | ((a != a) & (b != b))
        if not bool(same.all()):
            total += int((~same).sum())
            # max() of Python drops a NaN that comes second, torch's does not.
            worst = (a.to(torch.complex128) - b.to(torch.complex128)).abs()[~same].max()
            largest = float(torch.maximum(torch.tensor(largest, dtype=torch.float64), worst))
    if total:
        return Difference(name, "values", f"{total} of {count} elements", largest)
    if dtypes is not None and dtypes[0] != dtypes[1]:
        return Difference(name, "dtype", f"{dtypes[0]} and {dtypes[1]}")
    return None


# -- exporting -------------------------------------------------------------------------------------


def export_weights(
    saved: Saved,
    output_dir: str | Path,
    *,
    dtype: str = "fp32",
    max_shard_size: int | str = "5GB",
    exclude_frozen_parameters: bool = False,
    overwrite: bool = False,
) -> list[Path]:
    """Write the weights as safetensors in the layout of Hugging Face's `save_pretrained`.

    Returns the files that were written.

    One ``model.safetensors``, or with more than `max_shard_size` bytes
    ``model-00001-of-0000N.safetensors`` and an index.

    dtype: "fp32", "bf16", "fp16" (for floating-point tensors), or "saved" to leave them. Shared
        tensors are stored once; their other names are in the metadata.
    overwrite: replace weights that are in the folder, all of them; else they are an error. Other
        files there are left alone.

    CheckpointError when a weight is cut along mesh axes.
    """
    folder = check_path(output_dir, "output_dir")
    check_output(folder, overwrite)
    if dtype not in EXPORT_DTYPES:
        raise CheckpointError(f"dtype {dtype!r} is not one of {', '.join(EXPORT_DTYPES)}")
    _refuse_split(saved)
    left_out = set(saved.manifest.frozen) if exclude_frozen_parameters else set()
    items = [
        _item(saved, name, EXPORT_DTYPES[dtype]) for name in saved.weights() if name not in left_out
    ]
    limit = parse_size(max_shard_size)
    shards: list[list[Item]] = []
    filled = 0
    for item in items:
        size = math.prod(item[1]) * item[2].itemsize
        if not shards or filled + size > limit:
            shards.append([])
            filled = 0
        shards[-1].append(item)
        filled += size
    return _write_shards(folder, shards or [[]], saved, left_out)


def _weights_in(folder: Path) -> list[Path]:
    """The files of weights in a folder that this or another program exported to."""
    return (
        sorted(path for path in folder.iterdir() if _WEIGHTS.fullmatch(path.name))
        if folder.is_dir()
        else []
    )


def check_output(folder: Path, overwrite: bool) -> None:
    """CheckpointError before anything is read when the weights cannot go to `folder`."""
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder} is a file; name a folder for the weights")
    if os.path.lexists(folder / MANIFEST):
        raise CheckpointError(f"{folder} is a checkpoint; name another folder for the weights")
    if not overwrite and (found := _weights_in(folder)):
        raise CheckpointError(
            f"{folder} holds weights already ({found[0].name}); name another folder, or replace "
            "them "
            "with overwrite=True (dscore checkpoint export --overwrite)"
        )


def _write_shards(
    folder: Path, shards: list[list[Item]], saved: Saved, left_out: set[str]
) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    shared = {
        a: n for a, n in saved.manifest.shared.items() if n not in left_out and a not in left_out
    }
    names = ["model.safetensors"]
    if len(shards) > 1:
        names = [
            f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)
        ]
    for name, items in zip(names, shards, strict=True):
        here = {item[0] for item in items}
        metadata = {a: n for a, n in shared.items() if n in here} | {"format": "pt"}
        write = functools.partial(write_tensors, items=items, metadata=metadata)
        files.replace_with(folder / name, write)
    paths = [folder / name for name in names]
    index = folder / _INDEX
    # of an earlier export; readers would take them for a part of this one
    for old in _weights_in(folder):
        if old.name not in (*names, index.name) or (old == index and len(shards) == 1):
            old.unlink()
    if len(shards) == 1:
        return paths
    where = {item[0]: name for name, items in zip(names, shards, strict=True) for item in items}
    where |= {alias: where[name] for alias, name in shared.items() if name in where}
    size = sum(math.prod(shape) * kind.itemsize for items in shards for _, shape, kind, _ in items)
    text = json.dumps(
        {"metadata": {"total_size": size}, "weight_map": where}, indent=2, sort_keys=True
    )
    files.replace_with(index, lambda path: files.write_file(path, text.encode()))
    return [*paths, index]


def _item(saved: Saved, name: str, wanted: torch.dtype | None) -> Item:
    state = f"module/{name}"
    if wanted not in (None, DTYPES[saved.source.dtype(state)]):
        state = saved.best(name)
    kind = DTYPES[saved.source.dtype(state)]
    target = wanted if wanted is not None and kind.is_floating_point else kind
    shape = saved.source.shape(state)
    return name, shape, target, lambda: saved.source.whole(state).to(target)


def _refuse_split(saved: Saved) -> None:
    if saved.split:
        raise CheckpointError(
            f"{saved.path}: {', '.join(saved.split[:3])} differ along mesh axes, so they have no "
            "one value to export; "
            "load the checkpoint into the model that was saved"
        )


def parse_size(size: int | str) -> int:
    """Bytes, of a number or of text such as "5GB" or "200MiB"; CheckpointError for anything
    else."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(size))
    if found is None or found[2].upper() not in _UNITS or float(found[1]) <= 0:
        raise CheckpointError(f"size {size!r}: write a number of bytes, or 500MB, 5GB, 2GiB")
    return int(float(found[1]) * _UNITS[found[2].upper()])


# -- state dicts, under their documented names -----------------------------------------------------

Opener = Callable[[str | Path, str | None], contextlib.AbstractContextManager[Saved]]
"""Opens a checkpoint: (the folder, the tag or None) -> what is in it."""


@dataclass(frozen=True, slots=True)
class LazyTensor:
    """Stands for a weight that is still on the disk; `contiguous` reads it.

    dtype, shape: as it will have.
    """

    read: Callable[[], Tensor]
    dtype: torch.dtype
    shape: torch.Size

    def contiguous(self) -> Tensor:
        """The weight, in fp32 if it is floating-point."""
        return self.read()


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | Path,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
    *,
    opened: Opener = open_saved,
) -> dict[str, Any]:
    """The full weights and buffers as one CPU state dict in fp32.

    The checkpoint may be of any stage and world size.

    checkpoint_dir: the folder above the tag's; tag None: the one that ``latest`` names. Shared
        tensors appear under all their names.
    lazy_mode: values are `LazyTensor`, read one by one by their ``contiguous()``.
    opened: what opens checkpoints, for those of another form.
    """
    with opened(checkpoint_dir, tag) as saved:
        lazy = functools.partial(_read, opened, saved.path) if lazy_mode else None
        return _fp32_state_dict(saved, exclude_frozen_parameters, lazy)


def load_state_dict_from_zero_checkpoint(
    model: nn.Module,
    checkpoint_dir: str | Path,
    tag: str | None = None,
    *,
    opened: Opener = open_saved,
) -> nn.Module:
    """Move `model` to the CPU and load the fp32 weights of a checkpoint into it; the model.

    CheckpointError when the names do not fit; weights that ``exclude_frozen_parameters`` left out
    stay as they are.
    opened: as in `get_fp32_state_dict_from_zero_checkpoint`.
    """
    with opened(checkpoint_dir, tag) as saved:
        model = model.cpu()
        excluded = {n.removeprefix("module/") for n in saved.manifest.excluded}
        wrong = model.load_state_dict(_fp32_state_dict(saved, False), strict=False)
        missing = [
            n for n in wrong.missing_keys if n not in excluded and not n.endswith("_extra_state")
        ]
        if missing or wrong.unexpected_keys:
            extra = ", ".join(wrong.unexpected_keys[:5])
            lacks = f"lacks {', '.join(missing[:5])}" if missing else f"has {extra} besides"
            raise CheckpointError(f"{saved.path} {lacks}; give the model that was saved")
        return model


def _fp32_state_dict(
    saved: Saved, exclude_frozen_parameters: bool, lazy: Callable[[str], Tensor] | None = None
) -> dict[str, Any]:
    """All weights and buffers, under all their names.

    lazy: reads one, when its `LazyTensor` is asked for it.
    """
    _refuse_split(saved)
    left_out = set(saved.manifest.frozen) if exclude_frozen_parameters else set()
    found: dict[str, Any] = {}
    for name in saved.weights():
        if name in left_out:
            continue
        if lazy is not None:
            kind = DTYPES[saved.source.dtype(saved.best(name))]
            target = torch.float32 if kind.is_floating_point else kind
            shape = torch.Size(saved.source.shape(f"module/{name}"))
            found[name] = LazyTensor(functools.partial(lazy, name), target, shape)
        else:
            found[name] = _fp32_weight(saved, name)
    return found | {
        alias: found[name] for alias, name in saved.manifest.shared.items() if name in found
    }


def _fp32_weight(saved: Saved, name: str) -> Tensor:
    """A weight or buffer, in fp32 if it is floating-point."""
    value = saved.source.whole(saved.best(name))
    return value.float() if value.is_floating_point() else value


def _read(opened: Opener, path: Path | str, name: str) -> Tensor:
    with opened(path, None) as saved:
        return _fp32_weight(saved, name)


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | Path,
    output_dir: str | Path,
    max_shard_size: int | str = "5GB",
    safe_serialization: bool = True,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    *,
    dtype: str = "fp32",
    opened: Opener = open_saved,
) -> list[Path]:
    """Write a checkpoint's fp32 weights to safetensors files, with an index if there are several.

    Returns the files.

    Weights that are in `output_dir` are replaced.

    safe_serialization: False, which asks for pickles, is answered with safetensors too, and a
        warning.
    dtype: another, as in `export_weights`.
    opened: as in `get_fp32_state_dict_from_zero_checkpoint`.
    """
    if not safe_serialization:
        log.warning(
            "safe_serialization=False asks for pickled files; safetensors files are written instead"
        )
    with opened(checkpoint_dir, tag) as saved:
        return export_weights(
            saved,
            output_dir,
            dtype=dtype,
            max_shard_size=max_shard_size,
            exclude_frozen_parameters=exclude_frozen_parameters,
            overwrite=True,
        )
