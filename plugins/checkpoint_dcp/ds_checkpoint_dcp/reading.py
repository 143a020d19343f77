"""Checkpoints of torch.distributed.checkpoint, opened: pieces of states that are read by ranges."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from ds_checkpoint.folder.format import check_name
from ds_checkpoint.folder.values import decode
from ds_checkpoint.formats.foreign import ForeignCheckpoint, Piece, new_run
from ds_run_state.slices import Box
from torch import Tensor

from ds_checkpoint_dcp.layout import Layout, groups_of, nested, read_layout, unread
from ds_checkpoint_dcp.metadata import METADATA, Metadata, read_metadata
from ds_checkpoint_dcp.records import DataFile, NotPlain, Record
from ds_core.errors import CheckpointError

_MOST_OPEN = 512


class Stored:
    """The tensors and values of a folder, by the names that they have there."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self.folder = folder
        self.metadata: Metadata = read_metadata(folder)
        names = sorted({place.file for place in self.metadata.places.values()})
        if len(names) > _MOST_OPEN:
            raise CheckpointError(f"{folder} has {len(names)} files; {_MOST_OPEN} are the most")
        self._files = {
            name: stack.enter_context(contextlib.closing(DataFile(folder / name))) for name in names
        }

    def record(self, name: str, begin: tuple[int, ...] | None) -> Record:
        """The record of a box of a tensor, or of a value."""
        place = self.metadata.places[name, begin]
        return Record(self._files[place.file], place.offset, place.length, name)

    def pieces(self, name: str, state: str) -> Iterator[Piece]:
        """A tensor's boxes as pieces of the state `state`."""
        tensor = self.metadata.tensors[name]
        check_name(state)
        for box in tensor.boxes:
            record = self.record(name, box.first)
            whole = box == Box.whole(tensor.shape)
            yield Piece(
                state,
                tensor.shape,
                tensor.dtype,
                record.reader(tensor.dtype, box.size),
                None if whole else box,
                check=partial(record.check, tensor.dtype, box.size),
            )

    def value(self, name: str) -> Any:
        """A plain value, or a tensor without dimensions or of one element, as a number."""
        if name not in self.metadata.tensors:
            return self.record(name, None).value()
        return self.tensor(name)

    def tensor(self, name: str) -> Tensor:
        """A small tensor, whole."""
        tensor = self.metadata.tensors[name]
        if len(tensor.boxes) > 1:
            raise CheckpointError(f"{self.folder}: {name!r} is in several pieces, and is to be one")
        out = torch.empty(Box.whole(tensor.shape).numel, dtype=tensor.dtype)
        for piece in self.pieces(name, "value"):
            piece.read(0, out)
        return out.view(tensor.shape)


@contextlib.contextmanager
def open_dcp(folder: Path) -> Iterator[ForeignCheckpoint]:
    """A checkpoint in one of the layouts of `layout`."""
    with contextlib.ExitStack() as stack:
        stored = Stored(folder, stack)
        known = stored.metadata.paths
        names = (*stored.metadata.tensors, *stored.metadata.values)
        layout = read_layout({n: known.get(n, (n,)) for n in names}, stored.metadata.tensors)
        if not layout.weights:
            raise CheckpointError(f"{folder} holds no weights; give the folder that has them")
        yield _opened(folder, stored, layout)


def _opened(folder: Path, stored: Stored, layout: Layout) -> ForeignCheckpoint:
    pieces = [p for w, name in layout.weights.items() for p in stored.pieces(name, f"module/{w}")]
    for (key, weight), name in layout.states.items():
        if name in stored.metadata.tensors:
            pieces += stored.pieces(name, f"optimizer/{key}/{weight}")
    missing = [unread(layout.others)] if layout.others else []
    groups, params, values = groups_of(layout, stored.value)
    missing += _refused(values)
    groups = [{k: _number(v) for k, v in g.items()} for g in groups]
    groups = [{k: v for k, v in g.items() if _is_plain(v)} for g in groups]
    if layout.states and not groups:
        groups, params = [{}], [list(dict.fromkeys(weight for _, weight in layout.states))]
        missing.append("it has no hyperparameters of the optimizer; this run's stay as they are")
    run = new_run() | {"optimizer_groups": groups, "optimizer_params": params}
    run["global_steps"] = run["micro_steps"] = _steps(stored, layout)
    run["lr_scheduler"] = _schedule(stored, layout)
    optimizer = "torch.distributed.checkpoint:unknown class" if layout.states else None
    found = ForeignCheckpoint(folder, _tag(folder), pieces, run, optimizer=optimizer)
    if layout.ours:
        return with_ours(found, stored, layout.ours, missing)
    missing.append(_lacks(layout))
    return dataclasses.replace(found, missing=[m for m in missing if m])


def _lacks(layout: Layout) -> str:
    lacks = [] if layout.states else ["optimizer states"]
    lacks += [] if layout.schedule else ["a schedule"]
    lacks += ["a loss scale", "the data position", "random states"]
    return f"it has no {', '.join(lacks[:-1])} or {lacks[-1]} that this run could take over"


def _tag(folder: Path) -> str:
    """The folder's name, where it can be a tag."""
    kept = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in folder.name)
    return kept[:128].lstrip(".") or "imported"


def _number(value: Any) -> Any:
    """A tensor of one element as its number: a learning rate may be one."""
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def _is_plain(value: Any) -> bool:
    return not isinstance(value, NotPlain | Tensor | dict)


def _refused(values: Mapping[str, Any]) -> list[str]:
    bad = sorted(name for name, value in values.items() if isinstance(value, NotPlain))
    return [f"{bad[0]} is a {values[bad[0]]}, and is left out"] if bad else []


def _steps(stored: Stored, layout: Layout) -> int:
    """The number of optimizer steps: what the program says, else what the optimizer has counted."""
    counters = [name for (key, _), name in layout.states.items() if key == "step"]
    for name in (*layout.steps, *counters[:1]):
        tensor = stored.metadata.tensors.get(name)
        if tensor is not None and Box.whole(tensor.shape).numel != 1:
            continue
        value = _number(stored.value(name))
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1 << 53:
            return int(value)
    return 0


def _schedule(stored: Stored, layout: Layout) -> dict[str, Any] | None:
    """The state of the schedule; what in it is no plain value is left out."""
    if not layout.schedule:
        return None
    found = nested({path: stored.value(name) for path, name in layout.schedule.items()})
    if isinstance(found, list) and found:
        found = found[0]
    if not isinstance(found, dict):
        return None
    return {str(key): value for key, value in found.items() if not _has_objects(value)}


def _has_objects(value: Any) -> bool:
    inside: Iterable[Any] = ()
    if isinstance(value, dict):
        inside = value.values()
    elif isinstance(value, list | tuple):
        inside = value
    return isinstance(value, NotPlain) or any(map(_has_objects, inside))


def with_ours(
    found: ForeignCheckpoint, stored: Stored, ours: Mapping[str, str], missing: list[str]
) -> ForeignCheckpoint:
    """The same, with what only ds_core has written beside it."""
    text = stored.value(ours["values"]) if "values" in ours else None
    return from_text(found, text, lambda key: stored.tensor(ours[f"tensor.{key}"]), missing)


def from_text(
    found: ForeignCheckpoint, text: Any, tensor: Callable[[str], Tensor], missing: list[str]
) -> ForeignCheckpoint:
    """`found` with the values in `text`, which `ds_checkpoint_dcp.writing.values_of` made."""
    try:
        data = json.loads(text)
        where = f"{found.path}: dscore.values"
        run = decode(data["run"], tensor, where)
        client = decode(data["client"], tensor, where)
        int(run["global_steps"])
        shared = {str(a): str(n) for a, n in data["shared"].items()}
        frozen = [str(name) for name in data["frozen"]]
        low = {str(n): _LOW[kind] for n, kind in data["low"].items()}
        optimizer = data["optimizer"]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{found.path}: its dscore.values are not as ds_core writes them "
            f"({type(error).__name__}: {error}); convert the checkpoint again"
        ) from error
    # Each name of a shared weight is stored, for programs that look for it.
    pieces = [p for p in found.pieces if p.state.removeprefix("module/") not in shared]
    masters = {p.state for p in pieces if p.state.startswith("master/")}
    low = {name: kind for name, kind in low.items() if f"master/{name}" not in masters}
    pieces = [q for p in pieces for q in _with_master(p, low)]
    return ForeignCheckpoint(
        found.path,
        found.tag,
        pieces,
        run,
        client,
        optimizer if isinstance(optimizer, str) else None,
        frozen,
        shared,
        missing,
    )


_LOW = {"BF16": torch.bfloat16, "F16": torch.float16}


def _with_master(piece: Piece, low: Mapping[str, torch.dtype]) -> Iterator[Piece]:
    """The weight of a 16-bit run, which was stored by its fp32 values: both of them."""
    kind, _, name = piece.state.partition("/")
    if kind != "module" or name not in low:
        yield piece
        return

    def narrow(start: int, out: Tensor) -> None:
        exact = torch.empty(out.numel(), dtype=piece.dtype)
        piece.read(start, exact)
        out.copy_(exact)

    yield dataclasses.replace(piece, dtype=low[name], read=narrow, check=None)
    yield dataclasses.replace(piece, state=f"master/{name}")


def is_dcp(folder: Path) -> bool:
    """Whether a folder has the file that says what is in the others."""
    return (folder / METADATA).is_file()
