"""Megatron-core's ``torch_dist``: files of torch.distributed.checkpoint with flat names, beside
``metadata.json``, which says what it is, and ``common.pt``, which has what all ranks share.

Read from NVIDIA/Megatron-LM: megatron/core/dist_checkpointing/core.py (``metadata.json``),
strategies/common.py (``common.pt``), strategies/torch.py (the tensors) and optimizer.py, which calls
an optimizer's states ``optimizer.state.<key>.<weight>``. All layers of a kind are stored as one
tensor with a dimension for the layer in front: ``decoder.layers.mlp.linear_fc1.weight``; here each
layer gets its own name, ``decoder.layers.0.mlp.linear_fc1.weight``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from ds_checkpoint.folder import files
from ds_checkpoint.formats.foreign import GROUP_KEYS, ForeignCheckpoint, Piece, Written, new_run
from ds_checkpoint.formats.ours import run_values
from ds_checkpoint.offline import Saved
from ds_run_state.opening import parse_json, read_small
from ds_run_state.slices import Box
from torch import Tensor

from ds_checkpoint_dcp.layout import OURS, unread
from ds_checkpoint_dcp.reading import Stored, from_text
from ds_checkpoint_dcp.records import DataFile, NotPlain, Record
from ds_checkpoint_dcp.writing import (
    Tensors,
    new_folder,
    optimizer_states,
    rank_states,
    save_for_torch,
    state_item,
    values_of,
    write_records,
)
from ds_core.errors import CheckpointError

CONFIG = "metadata.json"
COMMON = "common.pt"
LATEST = "latest_checkpointed_iteration.txt"
_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(?P<key>[^.]+)\.(?P<weight>.+)")
_STACKED = re.compile(r"(?P<before>(?:.*\.)?layers)\.(?P<rest>(?!\d+\.).+)")
_MASTER = "fp32_param"


def is_megatron(folder: Path) -> bool:
    """Whether Megatron-core wrote it."""
    return (folder / CONFIG).is_file() and (folder / COMMON).is_file()


def _check_backend(folder: Path) -> None:
    path = folder / CONFIG
    try:
        backend = parse_json(read_small(path, 1 << 16), 1 << 10)["sharded_backend"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is not Megatron-core's: {error}") from error
    if backend != "torch_dist":
        raise CheckpointError(
            f"{path} says that {backend!r:.60} wrote the tensors; only 'torch_dist' can be read: "
            "save with --dist-ckpt-format torch_dist"
        )


@contextlib.contextmanager
def open_megatron(folder: Path) -> Iterator[ForeignCheckpoint]:
    """A checkpoint, its layers under their own names."""
    _check_backend(folder)
    with contextlib.ExitStack() as stack:
        stored = Stored(folder, stack)
        common = _common(folder, stack)
        yield _opened(folder, stored, common)


def _common(folder: Path, stack: contextlib.ExitStack) -> dict[str, Any]:
    file = stack.enter_context(contextlib.closing(DataFile(folder / COMMON)))
    found = Record(file, 0, file.size, "all ranks").value()
    if not isinstance(found, dict):
        raise CheckpointError(f"{folder / COMMON} holds a {type(found).__name__}, not a dict")
    return found


def _opened(folder: Path, stored: Stored, common: Mapping[str, Any]) -> ForeignCheckpoint:
    weights: dict[str, str] = {}
    states: dict[str, str] = {}
    for name in stored.metadata.tensors:
        state = _STATE.fullmatch(name)
        if state is None:
            weights[f"module/{name}"] = name
        elif state["key"] == _MASTER:
            states[f"master/{state['weight']}"] = name
        else:
            states[f"optimizer/{state['key']}/{state['weight']}"] = name
    shapes = {s.partition("/")[2]: stored.metadata.tensors[n].shape for s, n in weights.items()}
    fit, odd = _fitting(stored, states, shapes)
    others = [name for name in (*odd, *stored.metadata.values) if "_extra_state" not in name]
    # Random states and flat buffers of the optimizer are no weights.
    no_weights = [s for s in weights if s.startswith(("module/rng_state", "module/optimizer."))]
    others += [weights.pop(state) for state in no_weights]
    pieces = [p for s, n in {**weights, **fit}.items() for p in stored.pieces(n, s)]
    stacked = _stacked(shapes)
    pieces = [q for p in pieces for q in _unstacked(p, stacked)]
    groups, steps = _groups(common)
    missing = [unread(sorted(others))] if others else []
    if fit and not groups:
        groups = [{}]
        missing.append("it has no hyperparameters of the optimizer; this run's stay as they are")
    pieces += _counters(pieces, steps)
    run = new_run() | {"optimizer_groups": groups, "optimizer_params": []}
    iteration = common.get("iteration")
    run["global_steps"] = run["micro_steps"] = iteration if type(iteration) is int else 0
    optimizer = "Megatron-core:unknown class" if fit else None
    tag = folder.name if re.fullmatch(r"[A-Za-z0-9_-]{1,128}", folder.name) else "imported"
    found = ForeignCheckpoint(folder, tag, pieces, run, optimizer=optimizer)
    ours = common.get(OURS)
    if isinstance(ours, dict):
        tensors = ours.get("tensors")
        inside = tensors if isinstance(tensors, dict) else {}
        return from_text(found, ours.get("values"), inside.__getitem__, missing)
    missing.append(
        "it has no schedule, data position or random states that this run could take over"
    )
    return dataclasses.replace(found, missing=missing)


def _fitting(
    stored: Stored, states: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, str], list[str]]:
    """(the optimizer's states that have their weight's shape, names of the others).

    Megatron's distributed optimizer can store flat buffers, which no weight's name tells apart.
    """
    fit: dict[str, str] = {}
    odd: list[str] = []
    for state, name in states.items():
        weight = state.split("/")[-1]
        if stored.metadata.tensors[name].shape == shapes.get(weight):
            fit[state] = name
        else:
            odd.append(name)
    return fit, odd


def _stacked(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """The number of layers of each stack, by what comes before the layer's number."""
    sizes: dict[str, set[int]] = {}
    for name, shape in shapes.items():
        if (found := _STACKED.fullmatch(name)) is not None:
            sizes.setdefault(found["before"], set()).add(shape[0] if shape else -1)
    return {before: size.pop() for before, size in sizes.items() if len(size) == 1}


def _unstacked(piece: Piece, stacks: Mapping[str, int]) -> Iterator[Piece]:
    """A piece of several layers as one of each."""
    kind, _, weight = piece.state.rpartition("/")
    found = _STACKED.fullmatch(weight)
    if found is None or found["before"] not in stacks or len(piece.shape) < 2:
        yield piece
        return
    box = piece.box or Box.whole(piece.shape)
    size = math.prod(box.size[1:])
    inner = Box(box.first[1:], box.size[1:])
    for row in range(box.size[0]):
        read = partial(_shifted, piece, row * size)
        yield dataclasses.replace(
            piece,
            state=f"{kind}/{found['before']}.{box.first[0] + row}.{found['rest']}",
            shape=piece.shape[1:],
            read=read,
            box=None if inner == Box.whole(piece.shape[1:]) else inner,
        )


def _shifted(piece: Piece, by: int, start: int, out: Tensor) -> None:
    piece.read(by + start, out)


def _groups(common: Mapping[str, Any]) -> tuple[list[dict[str, Any]], float | None]:
    """(hyperparameters of each group, the number of the optimizer's steps)."""
    optimizer = common.get("optimizer")
    whole = optimizer if isinstance(optimizer, dict) else {}
    # Several optimizers in a chain, as of experts and the rest, are numbered.
    chain = [v for k, v in whole.items() if isinstance(k, int) and isinstance(v, dict)] or [whole]
    inner = [one.get("optimizer", one) for one in chain]
    inner = [one for one in inner if isinstance(one, dict)]
    rows = [r for one in inner for r in _list(one.get("param_groups")) if isinstance(r, dict)]
    groups = [{k: row[k] for k in GROUP_KEYS if k in row} for row in rows]
    groups = [{k: v for k, v in g.items() if not isinstance(v, NotPlain | Tensor)} for g in groups]
    states = [one.get("state") for one in inner]
    steps = [row.get("step") for row in rows]
    steps += [state.get("common_step") for state in states if isinstance(state, dict)]
    for step in steps:
        value = step.item() if isinstance(step, Tensor) and step.numel() == 1 else step
        if isinstance(value, int | float) and not isinstance(value, bool):
            return groups, float(value)
    return groups, None


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _counters(pieces: Iterable[Piece], steps: float | None) -> list[Piece]:
    """The counter of each weight that the optimizer has states of."""
    if steps is None:
        return []

    def read(_: int, out: Tensor) -> None:
        out.fill_(steps)

    trained = dict.fromkeys(
        p.state.removeprefix("optimizer/exp_avg/")
        for p in pieces
        if p.state.startswith("optimizer/exp_avg/")
    )
    return [Piece(f"optimizer/step/{name}", (), torch.float32, read) for name in trained]


# -- writing ---------------------------------------------------------------------------------------


def write_megatron(saved: Saved, output: Path) -> Written:
    """Write ``output/iter_N``; the names of weights are those of the model that was saved."""
    run, _ = run_values(saved)
    step = int(run["global_steps"])
    target = output / f"iter_{step:07d}"
    if (output / LATEST).exists():
        raise CheckpointError(f"{output / LATEST} is there already; name another folder")
    left = rank_states(saved)
    counts = {}
    for state, key, weight in optimizer_states(saved):
        if key == "step":
            counts[weight] = float(saved.source.whole(state).reshape(()).item())
    if len(set(counts.values())) > 1:
        raise CheckpointError(
            f"{saved.path}: weights have taken different numbers of steps, and torch_dist keeps one "
            "for all; convert it to another format"
        )
    files.make_root(output)
    with new_folder(target) as folder:
        write_records(folder, _items(saved))
        tensors: dict[str, Tensor] = {}
        text, refused = values_of(saved, tensors)
        left += refused
        common = {
            "checkpoint_version": 3.0,
            "iteration": step,
            "optimizer": {"optimizer": {"param_groups": _param_groups(run, counts)}},
            OURS: {"values": text, "tensors": tensors},
        }
        save_for_torch(common, folder / COMMON)
        config = {
            "sharded_backend": "torch_dist",
            "sharded_backend_version": 1,
            "common_backend": "torch",
            "common_backend_version": 1,
        }
        files.write_file(folder / CONFIG, json.dumps(config).encode())
    files.write_file(output / LATEST, str(step).encode())
    return Written(target, tuple(left))


def _items(saved: Saved) -> Iterator[Tensors]:
    for weight in saved.weights():
        yield state_item(saved, f"module/{weight}", (weight,))
        if saved.best(weight) != f"module/{weight}":
            path = (f"optimizer.state.{_MASTER}.{weight}",)
            yield state_item(saved, saved.best(weight), path)
    for state, key, weight in optimizer_states(saved):
        if key != "step":
            yield state_item(saved, state, (f"optimizer.state.{key}.{weight}",))


def _param_groups(run: Mapping[str, Any], counts: Mapping[str, float]) -> list[dict[str, Any]]:
    step = next(iter(counts.values()), None)
    extra = {} if step is None else {"step": step}
    return [{**group, **extra} for group in run["optimizer_groups"]]
