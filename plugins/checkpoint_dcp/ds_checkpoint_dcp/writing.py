"""Writing the files of torch.distributed.checkpoint, one tensor in memory at a time.

A checkpoint has the layout of `torch.distributed.checkpoint.state_dict.get_state_dict` under
``model`` and ``optim``, so that `dcp.load` reads it into FSDP2, or into plain torch, at any number of
ranks. What only ds_core has is beside it, under ``dscore``, where nobody else looks.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from ds_checkpoint.folder import files
from ds_checkpoint.folder.tensorfile import DTYPES
from ds_checkpoint.folder.values import encode
from ds_checkpoint.formats.ours import encodable, run_values
from ds_checkpoint.offline import Saved
from torch import Tensor
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as dcp

from ds_checkpoint_dcp.layout import OURS
from ds_checkpoint_dcp.metadata import METADATA, KeyPath
from ds_core.errors import CheckpointError

DATA = "__0_0.distcp"


@dataclass(frozen=True, slots=True)
class Tensors:
    """A tensor to be written: the keys that lead to it, and a function that gives it."""

    path: KeyPath
    shape: tuple[int, ...]
    dtype: torch.dtype
    give: Callable[[], Tensor]


@dataclass(frozen=True, slots=True)
class Value:
    """A plain value to be written."""

    path: KeyPath
    value: Any


@contextlib.contextmanager
def new_folder(output: Path) -> Iterator[Path]:
    """A folder that becomes `output` when all of it is there; CheckpointError where something is."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise CheckpointError(f"{output} is there already; remove it, or name another folder")
    files.make_root(output.parent)
    temporary = output.with_name(f".tmp-{output.name}-{secrets.token_hex(8)}")
    temporary.mkdir()
    try:
        yield temporary
        files.sync_directory(temporary)
        os.replace(temporary, output)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    files.sync_directory(output.parent)


def write_records(folder: Path, items: Iterable[Tensors | Value]) -> None:
    """One file of records, and ``.metadata``."""
    entries: dict[str, Any] = {}
    places: dict[Any, Any] = {}
    paths: dict[str, KeyPath] = {}
    with open(folder / DATA, "xb") as file:
        for item in items:
            name = ".".join(map(str, item.path))
            if name in entries:
                raise CheckpointError(f"two tensors or values would be called {name!r}")
            paths[name] = item.path
            begin = file.tell()
            if isinstance(item, Tensors):
                entries[name] = _entry(item)
                index = dcp.MetadataIndex(name, [0] * len(item.shape), 0)
                # No longer than its record is written, it is in memory.
                save_for_torch(_alone(item.give()), file)
            else:
                entries[name] = dcp.BytesStorageMetadata()
                index = dcp.MetadataIndex(name)
                text = io.BytesIO()
                save_for_torch(item.value, text)
                file.write(text.getbuffer())
            places[index] = filesystem._StorageInfo(DATA, begin, file.tell() - begin)
        file.flush()
        os.fsync(file.fileno())
    found = dcp.Metadata(entries, planner_data=paths, storage_data=places)
    found.storage_meta = dcp.StorageMeta(save_id=secrets.token_hex(16))
    found.version = "1.0.0"
    files.write_file(folder / METADATA, pickle.dumps(found, protocol=4))


def save_for_torch(value: Any, file: Any) -> None:
    """A value as those programs load it: `file` is a path or an open file."""
    torch.save(value, file)


def _alone(tensor: Tensor) -> Tensor:
    """A tensor without the rest of its storage."""
    tensor = tensor.detach().contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _entry(item: Tensors) -> dcp.TensorStorageMetadata:
    size = torch.Size(item.shape)
    chunk = dcp.ChunkStorageMetadata(torch.Size([0] * len(size)), size)
    return dcp.TensorStorageMetadata(dcp.TensorProperties(dtype=item.dtype), size, [chunk])


# -- a checkpoint of any program as items ----------------------------------------------------------


def exact_weights(saved: Saved, root: KeyPath) -> Iterator[Tensors]:
    """Every weight and buffer under all its names, as exact as it was saved."""
    other: dict[str, list[str]] = {}
    for alias, name in saved.manifest.shared.items():
        other.setdefault(name, []).append(alias)
    for weight in saved.weights():
        for name in (weight, *other.get(weight, ())):
            yield state_item(saved, saved.best(weight), (*root, name))


def state_item(saved: Saved, state: str, path: KeyPath) -> Tensors:
    """A whole state."""
    shape = saved.source.shape(state)
    dtype = DTYPES[saved.source.dtype(state)]
    return Tensors(path, shape, dtype, lambda: saved.source.whole(state))


def optimizer_states(saved: Saved) -> Iterator[tuple[str, str, str]]:
    """(state, key, weight) of every state of the optimizer that is a parameter's."""
    for state in saved.source.names():
        kind, _, rest = state.partition("/")
        if kind == "optimizer":
            key, _, weight = rest.partition("/")
            yield state, key, weight


def groups_for_torch(saved: Saved, run: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The groups as torch's optimizer of that kind has them: `dcp.load` looks for each of its keys."""
    trained = list(dict.fromkeys(weight for _, _, weight in optimizer_states(saved)))
    groups = [dict(group) for group in run["optimizer_groups"]] or ([{}] if trained else [])
    params = [list(names) for names in run.get("optimizer_params") or []]
    params = params if len(params) == len(groups) else [[] for _ in groups]
    named = {name for names in params for name in names}
    if groups:
        params[0] += [name for name in trained if name not in named]
    defaults = _defaults({key for _, key, _ in optimizer_states(saved)}, saved.manifest.optimizer)
    return [{**defaults, **g, "params": p} for g, p in zip(groups, params, strict=True)]


def _defaults(keys: set[str], optimizer: str | None) -> dict[str, Any]:
    """The hyperparameters of torch's optimizer that keeps such states."""
    stand_in = [torch.nn.Parameter(torch.zeros(1))]
    decoupled = "AdamW" in (optimizer or "AdamW")
    if {"exp_avg", "exp_avg_sq"} <= keys:
        made: Any = torch.optim.AdamW(stand_in) if decoupled else torch.optim.Adam(stand_in)
    elif "momentum_buffer" in keys:
        made = torch.optim.SGD(stand_in)
    elif "sum" in keys:
        made = torch.optim.Adagrad(stand_in)
    else:
        return {}
    return {key: value for key, value in made.param_groups[0].items() if key != "params"}


def values_of(saved: Saved, tensors: dict[str, Tensor]) -> tuple[str, list[str]]:
    """(what only ds_core reads as a text; what it cannot hold). Tensors go into `tensors`."""
    run, client = run_values(saved)
    client, left = encodable(client)
    low = {
        name: saved.source.dtype(f"module/{name}")
        for name in saved.weights()
        if saved.best(name) != f"module/{name}"
    }
    data = {
        "run": encode(run, "run_state", tensors, own=True),
        "client": encode(client, "client_state", tensors),
        "shared": dict(saved.manifest.shared),
        "frozen": list(saved.manifest.frozen),
        "low": low,
        "optimizer": saved.manifest.optimizer,
    }
    return json.dumps(data), left


def fsdp_items(saved: Saved, left: list[str]) -> Iterator[Tensors | Value]:
    """All of a checkpoint, in the layout of `get_state_dict`; `left`: what has no place is added."""
    run, _ = run_values(saved)
    yield from exact_weights(saved, ("model",))
    for state, key, weight in optimizer_states(saved):
        yield state_item(saved, state, ("optim", "state", weight, key))
    for number, group in enumerate(groups_for_torch(saved, run)):
        for key, value in group.items():
            yield Value(("optim", "param_groups", number, key), value)
    yield Value(("train_state", "step"), int(run["global_steps"]))
    schedule = run["lr_scheduler"]
    if isinstance(schedule, dict):
        for key, value in schedule.items():
            yield Value(("lr_scheduler", str(key)), value)
    tensors: dict[str, Tensor] = {}
    text, refused = values_of(saved, tensors)
    left += refused
    yield Value((OURS, "values"), text)
    for key, tensor in tensors.items():
        path = (OURS, f"tensor.{key}")
        yield Tensors(path, tuple(tensor.shape), tensor.dtype, partial(_itself, tensor))


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def rank_states(saved: Saved) -> list[str]:
    """What is said of what a checkpoint of ours keeps for each rank."""
    if saved.values is not None:
        return []
    also = ", and extra states of modules" if saved.manifest.module_extra else ""
    return [f"random states and plugins' states of each rank are left out{also}"]
