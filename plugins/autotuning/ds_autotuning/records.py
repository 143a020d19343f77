"""What runs and the tuner tell each other, in JSON files: a trial's `Result` and a model's
`Profile` (torch-free).
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any


class Status(str, Enum):
    """How a trial ended."""

    DONE = "done"
    OUT_OF_MEMORY = "out_of_memory"
    TIMEOUT = "timeout"
    CRASHED = "crashed"
    DOES_NOT_FIT = "does_not_fit"  # never run: the forecast of its memory is above the room
    INVALID = "invalid"  # never run: the config is refused


@dataclass(frozen=True)
class Result:
    """One trial; None is what was not measured."""

    status: Status
    # Why it is refused or has failed.
    reason: str = ""
    # -- speed
    # Samples per second of all ranks.
    throughput: float | None = None
    # Seconds per optimizer step.
    latency: float | None = None
    # Floating-point operations per device and second.
    flops: float | None = None
    # Seconds of each timed step.
    seconds: tuple[float, ...] = ()
    # -- memory, in bytes, of the rank with most
    peak_device: int | None = None
    peak_host: int | None = None
    # -- the processes
    # ISO 8601.
    started: str = ""
    # Seconds from their start to their end.
    took: float = 0.0

    def metric(self, name: str) -> float | None:
        """The value of "throughput", "latency" or "flops"; None where the trial did not come so
        far.
        """
        value: float | None = getattr(self, name)
        return value

    def to_json(self) -> dict[str, Any]:
        """For `write_json`."""
        return {**dataclasses.asdict(self), "status": self.status.value}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Result:
        """Raises ValueError, TypeError or KeyError where `data` is not a result."""
        found = cls(
            **{**data, "status": Status(data["status"]), "seconds": tuple(data.get("seconds", ()))},
        )
        numbers = (found.throughput, found.latency, found.flops, found.peak_device, found.peak_host)
        for value in (*(n for n in numbers if n is not None), *found.seconds, found.took):
            if (
                isinstance(value, bool)
                or not isinstance(value, (int, float))
                or not 0 <= value < 1e100
            ):
                raise ValueError(f"{value!r} is no measurement")
        if not isinstance(found.reason, str) or not isinstance(found.started, str):
            raise TypeError("a reason and a time are texts")
        return found


@dataclass(frozen=True)
class Forecast:
    """Bytes of the rank that needs most, forecast before a trial."""

    # `states`, `activations` and `fixed` together. On the CPU the host is the device.
    device: float
    # Model states there, and what a process needs by itself.
    host: float
    # Model states.
    disk: float = 0.0
    # Model states on the device.
    states: float = 0.0
    # Activations of one micro-batch.
    activations: float = 0.0
    # The same for all settings.
    fixed: float = 0.0


@dataclass(frozen=True)
class Row:
    """One trial of a search, as results show it.

    setting: dotted key of the config -> its value.
    """

    number: int
    name: str
    setting: Mapping[str, Any]
    result: Result
    forecast: Forecast | None = None


@dataclass(frozen=True)
class Parameter:
    """A module's own parameter.

    shape: of the whole.
    shared: its first full name, where it has several.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool = True
    shared: str = ""


@dataclass(frozen=True)
class ModuleRow:
    """One module: its path ("" is the model), class and own parameters."""

    path: str
    kind: str
    parameters: tuple[Parameter, ...] = ()


@dataclass(frozen=True)
class Profile:
    """What a short run tells of a model.

    parameters, trainable: numbers of elements.
    modules: in the order of ``named_modules``.
    activation_bytes_per_sample, fixed_bytes: memory beyond model states is their line in the
        micro-batch size, per device; None where it was not measured.
    seconds: micro-batch size -> s per step.
    facts: pipeline (bool), experts (number), transformers (bool), sequence_length, hidden_size,
        layers, world, device (torch's name of the type), device_memory, host_memory (free bytes per
        rank when the run began), host_base (bytes of a process besides model states), recomputes
        (bool), recomputed_part (of activations, if blocks were recomputed), ``config``, the run's
        config without secrets, and ``peaks``: micro-batch size -> bytes of "device" and "host".
    """

    parameters: int
    trainable: int
    modules: tuple[ModuleRow, ...] = ()
    activation_bytes_per_sample: float | None = None
    fixed_bytes: float | None = None
    seconds: Mapping[int, float] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """For `write_json`."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Profile:
        """Raises ValueError, TypeError or KeyError where `data` is not a profile."""
        rows = (
            ModuleRow(
                m["path"],
                m["kind"],
                tuple(Parameter(**{**p, "shape": tuple(p["shape"])}) for p in m["parameters"]),
            )
            for m in data.get("modules", ())
        )
        seconds = {int(size): float(value) for size, value in data.get("seconds", {}).items()}
        return cls(**{**data, "modules": tuple(rows), "seconds": seconds})


def _parameter(data: Mapping[str, Any]) -> Parameter:
    return Parameter(**{**data, "shape": tuple(data["shape"])})


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write a file that is whole or not there, whenever the process dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    with part.open("w", encoding="utf-8") as file:
        json.dump(data, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a file; None where there is no file, or no object in it."""
    try:
        # A FIFO would be waited for.
        data = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    except (OSError, ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None
