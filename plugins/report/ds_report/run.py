"""`Run`: what a report shows of one run, wherever it comes from."""

from __future__ import annotations

import math
import statistics
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ds_command_kit.show import CommandError

from ds_report.foreign import csv_files, event_files, read_csv, read_events
from ds_report.reading import RankRecord, rank_files, read_now, read_rank
from ds_report.top.state import Standing, State, standing

GIB = 2.0**30
HOST = "host_ms/"
ELAPSED = "elapsed_time_ms_"


@dataclass(frozen=True, slots=True)
class Points:
    """One curve. x counts what `Run.base` says."""

    x: Sequence[float]
    y: Sequence[float]


@dataclass(frozen=True, slots=True)
class RankRow:
    """One rank in a table. NaN: unknown."""

    rank: int
    host: str
    state: str
    steps: int
    peak: float
    step_ms: float
    # The part of a step, 0 to 1, that it waits for other ranks.
    wait: float


@dataclass(slots=True)
class Run:
    """One run."""

    name: str
    path: Path
    # What wrote the files: "record", or a monitor.
    source: str
    # -- curves
    # What x counts: "step" or "samples".
    base: str
    # Metric -> points; of rank 0 where ranks differ.
    curves: dict[str, Points]
    standing: Standing = field(default_factory=lambda: Standing(State.UNKNOWN))
    # Rank -> GiB in use.
    memory: dict[int, Points] = field(default_factory=dict)
    # Other things to count, by name -> (x of `base`, its value there).
    axes: dict[str, Points] = field(default_factory=dict)
    # -- one step
    # Mean milliseconds in each phase, and whether they are the host's time alone.
    phases: dict[str, float] = field(default_factory=dict)
    phases_of_host: bool = False
    ranks: list[RankRow] = field(default_factory=list)
    # -- the run as a whole
    # The line ``start`` of the first rank.
    facts: Mapping[str, Any] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)
    # Of training: when it began (seconds since 1970), how long it took, how often it was started.
    started: float = math.nan
    seconds: float = math.nan
    starts: int = 1
    total_steps: int | None = None

    def last(self, name: str) -> float:
        """The last finite value of a metric, NaN without one."""
        return (
            next((v for v in reversed(self.curves[name].y) if math.isfinite(v)), math.nan)
            if name in self.curves
            else math.nan
        )

    def finite(self, name: str) -> list[float]:
        """The finite values of a metric."""
        return [v for v in self.curves[name].y if math.isfinite(v)] if name in self.curves else []


# -- finding ---------------------------------------------------------------------------------------


def _is_run(folder: Path) -> bool:
    return bool(rank_files(folder) or csv_files(folder) or event_files(folder))


def find_runs(paths: Iterable[Path]) -> list[Path]:
    """The folders of runs that `paths` name; of a folder that is no run, the runs in it.

    Raises CommandError.
    """
    found: list[Path] = []
    for path in paths:
        if not path.exists():
            raise CommandError(f"{str(path)!r}: no such folder")
        folder = path if path.is_dir() else path.parent
        here = (
            [folder]
            if _is_run(folder)
            else [p for p in sorted(folder.iterdir()) if p.is_dir() and _is_run(p)]
        )
        if not here:
            raise CommandError(
                f"{str(path)!r} holds no run: no record (rank0.jsonl), no files of csv_monitor and "
                "no event files of "
                'TensorBoard. Train with "run_record": {"folder": ...} in the config, or `dscore '
                "run --record FOLDER`"
            )
        found += [each for each in here if each not in found]
    return found


def names_of(folders: Sequence[Path]) -> list[str]:
    """A short name for each folder: as many last parts of its path as tell it from the others."""
    parts = [folder.absolute().parts for folder in folders]
    for count in range(1, max((len(p) for p in parts), default=1) + 1):
        names = ["/".join(p[-count:]) for p in parts]
        if len(set(names)) == len(names):
            return names
    return [str(folder) for folder in folders]


# -- reading ---------------------------------------------------------------------------------------


def read_run(folder: Path, name: str) -> Run:
    """A run from its record, else from the files of monitors.

    Raises CommandError for what cannot be read.
    """
    try:
        if files := rank_files(folder):
            return _of_record(folder, name, [read_rank(rank, path) for rank, path in files.items()])
        source, series = (
            ("csv_monitor", read_csv(folder))
            if csv_files(folder)
            else ("tensorboard", read_events(folder))
        )
    except OSError as error:
        raise CommandError(f"{folder}: {error}") from error
    run = Run(name, folder, source, "samples", {})
    for tag, columns in series.items():
        run.curves[canonical(tag)] = Points(columns.step, columns.column("y"))
    longest = max(series.values(), key=lambda c: len(c.step), default=None)
    if longest is not None and any(map(math.isfinite, longest.time)):
        begin = next(t for t in longest.time if math.isfinite(t))
        run.axes["hours"] = Points(longest.step, [(t - begin) / 3600 for t in longest.time])
        run.started = begin
        run.seconds = max(t for t in longest.time if math.isfinite(t)) - begin
    run.phases = _phases(run, ELAPSED)
    return run


def canonical(name: str) -> str:
    """The name under which a metric is shown, whoever wrote it."""
    name = name.removeprefix("Train/Samples/")
    return "loss" if name == "train_loss" else name


def _of_record(folder: Path, name: str, ranks: list[RankRecord]) -> Run:
    first = ranks[0]
    columns = first.columns
    state = standing(ranks, {r.rank: read_now(folder, r.rank) for r in ranks})
    run = Run(name, folder, "record", "step", {}, state)
    # The last start's facts: a resumed run may have other versions or devices.
    run.facts = {"versions": {}, "device": "?", **first.starts[-1]} if first.starts else {}
    if run.facts and not isinstance(run.facts["versions"], dict):
        run.facts = {**run.facts, "versions": {}}
    run.starts = max(1, len(first.starts))
    for metric in list(columns.values):
        if not metric.startswith(HOST) and metric != "samples":
            run.curves.setdefault(canonical(metric), Points(columns.step, columns.column(metric)))
    run.curves |= _evaluations(first)
    for rank in ranks:
        if rank.memory:
            run.memory[rank.rank] = Points(
                [m[0] for m in rank.memory], [m[1] / GIB for m in rank.memory]
            )
    run.events = [e for e in first.events if e.get("kind") in ("saved", "loaded", "lost")]
    run.total_steps = _total_steps(first, run)
    if columns.step:
        _add_times(run, first)
    run.ranks = [_row(rank) for rank in ranks]
    # Phases as the device ran them, where they were measured; else as the host waited for them.
    run.phases = _phases(run, ELAPSED)
    if not run.phases:
        run.phases_of_host = True
        hosts = {
            metric.removeprefix(HOST): columns.column(metric)
            for metric in columns.values
            if metric.startswith(HOST)
        }
        run.phases = _leaves(
            {phase: _mean(values) for phase, values in hosts.items()}, _step_ms(run)
        )
    return run


def _evaluations(record: RankRecord) -> dict[str, Points]:
    """Metrics of evaluations, by their name with ``eval/`` before it; NaN where one was not
    measured.
    """
    evaluated = [
        e
        for e in record.events
        if e.get("kind") == "eval"
        and isinstance(e.get("step"), int)
        and isinstance(e.get("metrics"), dict)
    ]
    found = {}
    for metric in {k for e in evaluated for k in e.get("metrics", {})}:
        rows = [(e["step"], e["metrics"].get(metric)) for e in evaluated]
        found[f"eval/{metric}"] = Points(
            [s for s, _ in rows], [v if isinstance(v, float) else math.nan for _, v in rows]
        )
    return found


def _total_steps(record: RankRecord, run: Run) -> int | None:
    """How many steps the run is to have: as its program said last, or at its start."""
    planned = (e.get("total_steps") for e in reversed(record.events) if e.get("kind") == "plan")
    total = next(planned, None) or run.facts.get("total_steps")
    return total if type(total) is int and total > 0 else None


def _add_times(run: Run, first: RankRecord) -> None:
    """Time axis, time per step and throughput.

    The time between two starts of a run does not count.
    """
    columns = first.columns
    times = columns.time
    steps = columns.step
    begins = set(columns.starts)
    deltas = [math.nan] + [
        math.nan if i in begins else (times[i] - times[i - 1]) / (steps[i] - steps[i - 1])
        for i in range(1, len(times))
    ]
    first_start = first.starts[0].get("time") if first.starts else None
    run.started = first_start if isinstance(first_start, float) else times[0]
    usual = statistics.median(d for d in deltas if d == d) if any(d == d for d in deltas) else 0.0
    elapsed = 0.0
    hours = array("d")
    for i, delta in enumerate(deltas):
        elapsed += usual if delta != delta else delta * (steps[i] - steps[i - 1])
        hours.append(elapsed / 3600)
    run.seconds = elapsed
    run.axes["hours"] = Points(steps, hours)
    samples = columns.column("samples")
    if any(map(math.isfinite, samples)):
        run.axes["samples"] = Points(steps, samples)
    run.curves.setdefault("step_time_ms", Points(steps, [d * 1e3 for d in deltas]))
    if "samples_per_second" not in run.curves and "samples" in run.axes:
        rate = [math.nan] + [
            (samples[i] - samples[i - 1]) / (steps[i] - steps[i - 1]) / deltas[i]
            if deltas[i] > 0
            else math.nan
            for i in range(1, len(steps))
        ]
        run.curves["samples_per_second"] = Points(steps, rate)


def _row(rank: RankRecord) -> RankRow:
    columns = rank.columns
    last = range(max(1, len(columns.step) - 500), len(columns.step))
    deltas = [
        (columns.time[i] - columns.time[i - 1]) * 1e3 for i in last if i not in columns.starts
    ]
    step_ms = statistics.median(deltas) if deltas else math.nan
    waits = columns.column(f"{HOST}backward_allreduce")
    recent = [waits[i] for i in last if i < len(waits) and math.isfinite(waits[i])]
    wait = statistics.median(recent) / step_ms if recent and step_ms > 0 else math.nan
    peak = max((m[2] for m in rank.memory if math.isfinite(m[2])), default=math.nan) / GIB
    host = str(rank.starts[-1].get("host", "")) if rank.starts else ""
    state = rank.last if not rank.error else f"{rank.last}: {rank.error}"
    return RankRow(
        rank.rank,
        host,
        state,
        columns.step[-1] if columns.step else 0,
        peak,
        step_ms,
        min(wait, 1.0),
    )


def _mean(values: Sequence[float]) -> float:
    finite = [v for v in values if math.isfinite(v)]
    return sum(finite) / len(finite) if finite else math.nan


def _phases(run: Run, prefix: str) -> dict[str, float]:
    given = {
        name.removeprefix(prefix): _mean(p.y)
        for name, p in run.curves.items()
        if name.startswith(prefix)
    }
    return _leaves(given, _step_ms(run))


def _step_ms(run: Run) -> float:
    return _mean(run.finite("step_time_ms"))


def _leaves(mean: Mapping[str, float], step_ms: float) -> dict[str, float]:
    """Milliseconds of phases that do not overlap, in the order of a step."""

    def parts() -> Iterator[tuple[str, float]]:
        inner = mean.get("backward_inner", 0.0)
        waiting = mean.get("backward_allreduce", 0.0)
        yield "forward", mean.get("forward", 0.0)
        if inner or waiting:
            yield "backward", max(mean.get("backward", 0.0) - waiting, inner)
            yield "waiting for reductions", waiting
        else:
            yield "backward", mean.get("backward", 0.0)
        yield "step", mean.get("step", 0.0)

    found = {name: ms for name, ms in parts() if ms > 0}
    if found and step_ms > sum(found.values()):
        found["data and the rest"] = step_ms - sum(found.values())
    return found
