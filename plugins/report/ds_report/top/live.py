"""What ``dscore top`` knows of a run while it goes on: the ends of its files, read again and
again."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ds_report.reading import LONGEST_LINE, RankRecord, number, rank_files, read_now, take
from ds_report.run import HOST, canonical
from ds_report.top.state import Standing, State, standing

FIRST_LOOK = 2 * 1024 * 1024
"""Bytes at the end of each file that are read at first."""
KEPT = 20_000
RECENT = 200


@dataclass(slots=True)
class _Tail:
    """One rank's file, and how far it has been read."""

    record: RankRecord
    at: int = 0

    def read(self) -> None:
        """Take the whole lines that are new."""
        with self.record.path.open("rb") as file:
            size = file.seek(0, 2)
            if size < self.at:  # another file now
                self.record = RankRecord(self.record.rank, self.record.path)
                self.at = 0
            file.seek(0)
            if self.at == 0:
                take(self.record, file.readline(LONGEST_LINE))  # how the run began
                self.at = file.tell()
                if size - self.at > FIRST_LOOK:
                    file.seek(size - FIRST_LOOK)
                    file.readline(LONGEST_LINE)
                    self.at = file.tell()
            file.seek(self.at)
            while (line := file.readline(LONGEST_LINE)).endswith(b"\n") or len(
                line
            ) == LONGEST_LINE:
                take(self.record, line)
                self.at += len(line)
        self.record.columns.keep_last(KEPT)
        del self.record.memory[:-KEPT], self.record.events[:-KEPT], self.record.starts[1:-1]


@dataclass(frozen=True, slots=True)
class RankNow:
    """One rank.

    seconds: in `phase` for so long.
    wait: part of a step that it waits for others.

    NaN: unknown.
    """

    rank: int
    host: str
    step: int
    phase: str
    seconds: float
    step_ms: float
    wait: float
    allocated: float
    peak: float
    silent: bool = False
    straggler: bool = False


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A run at one moment.

    losses, rates: of the last steps.
    left: seconds until the planned end, NaN where unknown.
    """

    name: str
    standing: Standing
    step: int
    total: int | None
    losses: Sequence[float]
    rates: Sequence[float]
    tokens: float
    step_ms: float
    elapsed: float
    left: float
    memory: float
    world: int
    ranks: list[RankNow] = field(default_factory=list)

    @property
    def over(self) -> bool:
        """Whether nothing more will come."""
        return self.standing.state is not State.RUNNING


class Watch:
    """A run that is being watched. `look` reads what is new."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._tails: dict[int, _Tail] = {}

    def look(self, clock: float | None = None) -> Snapshot:
        """The run now. Raises OSError when its files cannot be read."""
        clock = time.time() if clock is None else clock
        for rank, path in rank_files(self.folder).items():
            self._tails.setdefault(rank, _Tail(RankRecord(rank, path))).read()
        records = {rank: tail.record for rank, tail in sorted(self._tails.items())}
        now = {rank: read_now(self.folder, rank) for rank in records}
        stands = standing(records.values(), now, clock)
        first = records[min(records)]
        facts = first.starts[-1] if first.starts else {}
        pace = _pace(first)
        step = first.columns.step[-1] if first.columns.step else 0
        total = _total(first, facts)
        begun = number(facts.get("time"))
        end = max((r.ended for r in records.values() if math.isfinite(r.ended)), default=clock)
        return Snapshot(
            name=self.folder.absolute().name,
            standing=stands,
            step=step,
            total=total,
            losses=_recent(first, "loss"),
            rates=_rates(first),
            tokens=next(reversed(_recent(first, "tokens_per_second")), math.nan),
            step_ms=pace * 1e3,
            elapsed=max(0.0, (clock if stands.state is State.RUNNING else end) - begun),
            left=max(0, total - step) * pace
            if total and stands.state is State.RUNNING
            else math.nan,
            memory=number(facts.get("memory")),
            world=world if type(world := facts.get("world_size")) is int else len(records),
            ranks=_ranks(records, now, clock, stands.state),
        )


def _total(first: RankRecord, facts: Mapping[str, Any]) -> int | None:
    planned = next(
        (e.get("total_steps") for e in reversed(first.events) if e.get("kind") == "plan"), None
    )
    total = planned or facts.get("total_steps")
    return total if type(total) is int and total > 0 else None


def _pace(record: RankRecord, count: int = RECENT) -> float:
    """Seconds per step over the last steps, within one start of the run; NaN before there are
    two."""
    columns = record.columns
    begin = max(
        [len(columns.step) - count, *(s for s in columns.starts if s < len(columns.step)), 0]
    )
    if len(columns.step) - begin < 2:
        return math.nan
    steps = columns.step[-1] - columns.step[begin]
    return max(columns.time[-1] - columns.time[begin], 0.0) / steps if steps else math.nan


def _recent(record: RankRecord, metric: str, count: int = 2000) -> list[float]:
    """The last finite values of a metric."""
    name = next((n for n in record.columns.values if canonical(n) == metric), None)
    return [v for v in record.columns.column(name)[-count:] if math.isfinite(v)] if name else []


def _rates(record: RankRecord, count: int = 2000) -> list[float]:
    if measured := _recent(record, "samples_per_second", count):
        return measured
    columns = record.columns
    samples = columns.column("samples")
    rows = [
        i
        for i in range(max(1, len(columns.step) - count), len(columns.step))
        if i not in columns.starts
    ]
    taken = [(i, columns.time[i] - columns.time[i - 1]) for i in rows]
    found = [(samples[i] - samples[i - 1]) / seconds for i, seconds in taken if seconds > 0]
    return [rate for rate in found if math.isfinite(rate)]


def _ranks(
    records: Mapping[int, RankRecord],
    now: Mapping[int, Mapping[str, Any]],
    clock: float,
    state: State,
) -> list[RankNow]:
    from ds_report.top.state import gave_no_sign

    waits = {rank: _wait(record) for rank, record in records.items()}
    known = sorted(w for w in waits.values() if math.isfinite(w))
    usual = statistics.median(known) if len(known) > 1 else math.nan
    found = []
    for rank, record in records.items():
        doing = now[rank]
        step = (
            at
            if type(at := doing.get("step")) is int
            else record.columns.step[-1]
            if record.columns.step
            else 0
        )
        found.append(
            RankNow(
                rank=rank,
                host=str(doing.get("host") or ""),
                step=step,
                phase=str(doing.get("phase") or "between steps")
                if record.last == "running"
                else record.last,
                seconds=max(0.0, clock - number(doing.get("since")))
                if record.last == "running"
                else math.nan,
                step_ms=_pace(record) * 1e3,
                wait=waits[rank],
                allocated=number(doing.get("allocated")),
                peak=number(doing.get("peak")),
                silent=record.last == "running" and gave_no_sign(doing, clock),
                straggler=state is State.RUNNING and usual > 0.1 and waits[rank] < usual / 2,
            )
        )
    return found


def _wait(record: RankRecord) -> float:
    """The part of a step that this rank waits for reductions; a rank that others wait for has
    little.
    """
    waits = [
        v for v in record.columns.column(f"{HOST}backward_allreduce")[-RECENT:] if math.isfinite(v)
    ]
    pace = _pace(record) * 1e3
    return min(1.0, statistics.fmean(waits) / pace) if waits and pace > 0 else math.nan
