"""A plan beside what a run held, and why they differ (torch-free).

The run wrote ``rank0.json`` and so on (section ``memory_snapshot`` of dscore-step-log): bytes by kind
between backward and step, and the peak of each phase.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_core.errors import UsageError

if TYPE_CHECKING:
    from ds_plan.needs import Need

RESTING = ("parameters", "masters", "states", "gradients")
CLOSE = 0.01
"""Differences below this part need no explanation: padding, states of one element."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What one rank held, in bytes."""

    rank: int

    dp: int
    """Data-parallel ranks of the run."""

    gas: int
    """Micro-batches per step."""

    device: str
    """The type of its device, such as "cuda"."""

    kinds: Mapping[str, Mapping[str, int]]
    """Bytes by place ("device", "host") and kind, between backward and step."""

    peak: int
    """The most in any phase, as the device counts it."""

    @property
    def total(self) -> int:
        """Bytes of all kinds in all places."""
        return sum(sum(kinds.values()) for kinds in self.kinds.values())


@dataclass(frozen=True, slots=True)
class Line:
    """One kind of memory, in bytes."""

    kind: str

    planned: int

    measured: int

    why: str
    """What the difference is; "" where there is none."""


def read_snapshots(folder: Path) -> list[Snapshot]:
    """The snapshots in `folder`, by rank.

    Raises UsageError where there is none, or one cannot be read.
    """
    files = [f for f in folder.glob("rank*.json") if not f.stem.endswith("-oom")]
    if not files:
        raise UsageError(
            f'{folder}: no snapshot here; run with "memory_snapshot": {{"enabled": true, "folder": '
            "...}"
        )
    found = []
    for file in files:
        try:
            found.append(_snapshot(json.loads(file.read_text(encoding="utf-8"))))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(
                f"{file}: is no snapshot of the section memory_snapshot: {error!r}"
            ) from error
    return sorted(found, key=lambda s: s.rank)


def _snapshot(data: Any) -> Snapshot:
    kinds = {
        place: {kind: int(size) for kind, size in data["kinds"][place].items()}
        for place in ("device", "host")
    }
    peak = max((int(used["peak"]) for used in data["phases"].values()), default=0)
    return Snapshot(
        int(data["rank"]), int(data["dp"]), int(data["gas"]), str(data["device"]), kinds, peak
    )


UNPLANNED = {
    "buffers": "of the model; not planned",
    "other": "batches, outputs, copies and messages under way; not planned",
}
"""Kinds on the device that no plan has, and what they are."""


def compare(need: Need, states: int, snapshot: Snapshot) -> list[Line]:
    """`need` beside what that rank held.

    states: elements of the optimizer per parameter with which it was planned.
    """
    # On the CPU the host is the device, and its memory is that of the process.
    on_host = snapshot.device == "cpu"
    lines = [*_compare_kinds(need, states, snapshot, "device", "host" if on_host else None)]
    lines += [
        Line(kind, 0, snapshot.kinds["device"].get(kind, 0), why) for kind, why in UNPLANNED.items()
    ]
    if not on_host:
        lines += _compare_kinds(need, states, snapshot, "host")
    planned = need.device.peak + (need.host.peak if on_host else 0)
    why = "activations and temporaries of autograd, which no plan counts"
    if on_host:
        why += "; and the process itself, Python and torch"
    return [*lines, Line("peak", planned, snapshot.peak, why)]


def _compare_kinds(
    need: Need, states: int, snapshot: Snapshot, place: str, also: str | None = None
) -> Iterator[Line]:
    """The kinds of one place that were planned or held.

    also: a place that is planned with it.
    """
    where = "" if place == "device" else " on the host"
    for kind in RESTING:
        planned = getattr(getattr(need, place), kind)
        if also is not None:
            planned += getattr(getattr(need, also), kind)
        measured = snapshot.kinds[place].get(kind, 0)
        if planned or measured:
            yield Line(kind + where, planned, measured, _why(kind, planned, measured, states))


def _why(kind: str, planned: int, measured: int, states: int) -> str:
    """The likeliest reason for a difference; "" where it is none."""
    if abs(measured - planned) <= CLOSE * max(planned, measured):
        return ""
    if kind == "states" and measured == 0:
        return "the optimizer had made none yet: memory_snapshot.step must be 2 or more"
    if kind == "states" and planned:
        each = states * measured / planned
        return (
            f"the optimizer keeps {each:.2g} elements per parameter, not {states} "
            "(--optimizer-states)"
        )
    if kind == "gradients":
        less = measured < planned
        return (
            "some parameters had no gradient in this step"
            if less
            else "buffers of reductions that are kept"
        )
    if planned and measured / planned in (2.0, 0.5):
        return "of another dtype: is the config that of the run?"
    if measured > planned:
        return "another model or config than that of the run"
    return "parts of the model are on other ranks (a pipeline, experts), or it is another model"
