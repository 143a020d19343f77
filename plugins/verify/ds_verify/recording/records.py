"""The record of a run on disk: per rank and step one file of tensors and one that says what they are.

safetensors and JSON only. A folder has `facts.json` (the layout) and, per rank, a folder with
``stepN.safetensors`` and ``stepN.json`` (what is compared), ``beginN.*`` (the weights before the
step), ``callsN.*`` (what is replayed) and ``done`` when the last step is there.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ds_core.errors import UsageError

KINDS = ("forward", "backward", "local gradient", "gradient", "scale", "norm", "state", "weight")
"""What is recorded.

forward: outputs of modules. backward: gradients of modules' inputs. local gradient: of a parameter,
from one micro-batch, before any reduction. gradient: of a parameter, as the optimizer gets it, but
not clipped. scale: what losses were multiplied by, with fp16. norm: of all gradients. state: of the
optimizer, and master weights. weight: what modules compute with.
"""


@dataclass(frozen=True, slots=True)
class Entry:
    """What is known of one recorded tensor, or of a part of it."""

    kind: str
    """One of `KINDS`."""
    name: str
    """Of the parameter or state, or of the module with what of it."""
    shape: tuple[int, ...]
    """Of the full tensor."""
    dtype: str
    """As torch has it, without "torch."."""
    first: int = 0
    """The place in the sample of the full tensor; -1: places are recorded too."""
    micro: int = 0
    """The micro-batch, counted from 0 in each step; 0 for what belongs to a step."""
    part: int = 0
    """The data-parallel index of the rank that saw this micro-batch; 0 for what all have."""
    order: int = 0
    """The place in the order of computation, inside its micro-batch, or its kind."""

    @property
    def key(self) -> tuple[str, str, int, int]:
        """What two runs have in common."""
        return self.kind, self.name, self.micro, self.part


_FIELDS = attrgetter(*(field.name for field in fields(Entry)))


class StepWriter:
    """Collects what one rank records in one step, and writes it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._folder.mkdir(parents=True, exist_ok=True)
        self._entries: list[Entry] = []
        self._tensors: dict[str, Tensor] = {}
        # Where gradients of micro-batches are, by key and place in the sample.
        self._local: dict[tuple[object, ...], int] = {}

    def add(self, entry: Entry, values: Tensor, places: Tensor | None = None) -> None:
        """Take over `values`, which nobody changes any more.

        A micro-batch's own gradient may come in several backwards, or tile by tile: the sum counts.
        """
        number = len(self._entries)
        if entry.kind == "local gradient":
            key = (*entry.key, entry.first)
            if (before := self._local.setdefault(key, number)) != number:
                self._tensors[str(before)] = self._tensors[str(before)] + values
                return
        self._tensors[str(number)] = values
        if places is not None:
            self._tensors[f"{number}.places"] = places
        self._entries.append(entry)

    def write(self, name: str) -> None:
        """Write what was collected under `name`, and begin the next."""
        # Hundreds of small tensors as a few large ones: to write each by itself takes longer.
        parts: dict[str, list[Tensor]] = {}
        ends: Counter[str] = Counter()

        def place(key: str) -> tuple[str, int, int] | None:
            """Where a tensor lies: in which of the large ones, from where, and its length."""
            if (values := self._tensors.get(key)) is None:
                return None
            dtype = str(values.dtype)
            parts.setdefault(dtype, []).append(values.reshape(-1))
            ends[dtype] += values.numel()
            return dtype, ends[dtype] - values.numel(), values.numel()

        rows = [
            [place(str(number)), place(f"{number}.places"), *_FIELDS(entry)]
            for number, entry in enumerate(self._entries)
        ]
        large = {dtype: torch.cat(values) for dtype, values in parts.items()}
        save_file(large, self._folder / f"{name}.safetensors")
        (self._folder / f"{name}.json").write_text(json.dumps(rows), encoding="utf-8")
        self._entries.clear()
        self._tensors.clear()
        self._local.clear()


@dataclass(frozen=True, slots=True)
class Recorded:
    """An entry with its values."""

    entry: Entry
    rank: int
    values: Tensor
    places: Tensor | None

    def of(self, full: Tensor) -> Tensor:
        """The elements of `full`, a whole sample, that stand where these do."""
        if self.places is not None:
            return full[self.places]
        return full[self.entry.first : self.entry.first + self.values.numel()]


class Record:
    """A finished record; raises UsageError where it is not whole."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        facts = folder / "facts.json"
        if not facts.exists():
            raise UsageError(f"{folder} has no record: the run ended before its first step")
        self.facts: Mapping[str, Any] = json.loads(facts.read_text(encoding="utf-8"))
        missing = [r for r in range(self.world) if not (folder / f"rank{r}" / "done").exists()]
        if missing:
            raise UsageError(
                f"the record in {folder} is not whole: rank {missing[0]} did not reach step "
                f"{self.facts['steps']}"
            )

    @property
    def world(self) -> int:
        """The number of ranks."""
        return int(self.facts["world"])

    @property
    def steps(self) -> int:
        """The number of steps."""
        return int(self.facts["steps"])

    def step(self, step: int) -> list[Recorded]:
        """All that was recorded in a step, of all ranks."""
        return self._read(f"step{step}")

    def begin(self, step: int) -> list[Recorded]:
        """The weights before a step; of the subject before the first alone."""
        return self._read(f"begin{step}")

    def _read(self, name: str) -> list[Recorded]:
        found = []
        for rank in range(self.world):
            path = self.folder / f"rank{rank}" / f"{name}.json"
            large = load_file(path.with_suffix(".safetensors"))
            for values, places, kind, name_, shape, *rest in json.loads(path.read_text("utf-8")):
                entry = Entry(kind, name_, tuple(shape), *rest)
                chosen = None if places is None else _slice(large, *places)
                found.append(Recorded(entry, rank, _slice(large, *values), chosen))
        return found


def _slice(large: Mapping[str, Tensor], dtype: str, start: int, size: int) -> Tensor:
    return large[dtype][start : start + size]


# -- arguments of calls ----------------------------------------------------------------------------


def encode(value: Any, put: Callable[[Tensor], str], what: str) -> Any:
    """`value`, nested containers of tensors and plain values, as JSON; `put` names each tensor.

    Raises UsageError for anything else: only data is written, never code.
    """
    if isinstance(value, Tensor):
        return {"tensor": put(value)}
    if isinstance(value, Mapping):
        rows = [[encode(k, put, what), encode(v, put, what)] for k, v in value.items()]
        return {"mapping": rows}
    if isinstance(value, (list, tuple)):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [encode(item, put, what) for item in value]}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise UsageError(
        f"verify cannot record {what}: it has a {type(value).__name__}, and only tensors, numbers, "
        "strings and containers of them can be replayed"
    )


def decode(value: Any, get: Callable[[str], Tensor]) -> Any:
    """The value that `encode` wrote."""
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    if kind == "tensor":
        return get(inner)
    if kind == "mapping":
        return {decode(k, get): decode(v, get) for k, v in inner}
    if kind == "dtype":
        return getattr(torch, inner)
    items = [decode(item, get) for item in inner]
    return items if kind == "list" else tuple(items)
