"""Who waited for whom: the traces of all ranks, aligned by their collectives (torch-free).

Clocks of different machines are not compared. All ranks leave a collective together, so the one
that came last spent the least time in it; that time is what the collective itself takes, and the
rest of the others' time is waiting for the last. Over all collectives each rank has made others
wait, and has waited; the straggler is the rank that has made others wait longest beyond its own
waiting (a rank that is late only because it waited for another is not to blame).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from ds_core.errors import UsageError
from ds_trace.one_rank import Made, RankTrace, read_rank

NOTABLE = 0.02
"""The least part of the steps for which one rank must have kept the others waiting to be called a
straggler.
"""


@dataclass(slots=True)
class Row:
    """One kind of collective: milliseconds per step, of the mean rank; `worst` is the rank on which
    it cost most.
    """

    title: str
    label: str
    bytes: int
    calls: float = 0.0
    cost: float = 0.0
    waiting: float = 0.0
    worst: int = 0
    _by_rank: dict[int, float] = field(default_factory=lambda: defaultdict(float))


@dataclass(frozen=True, slots=True)
class Straggler:
    """The rank that keeps the others waiting."""

    rank: int
    # Milliseconds per step that the other ranks together waited for it.
    caused: float
    # The collective in which they did most.
    mostly: str
    # Where it spends more time of its own than the median of the others, by `longer` milliseconds.
    phase: str
    longer: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """The traces of one run beside each other."""

    ranks: list[RankTrace]
    # Per rank, milliseconds per step spent waiting for others in collectives.
    waited: dict[int, float]
    rows: list[Row]
    straggler: Straggler | None


def read_run(folder: Path) -> list[RankTrace]:
    """The traces in `folder`, by rank.

    Raises UsageError if there is none, or they are of different runs.
    """
    files = sorted([*folder.glob("rank*.json.gz"), *folder.glob("rank*.json")])
    if not files:
        raise UsageError(
            f"{folder}: no trace here; files are called rank0.json.gz (section torch_profiler, key "
            "folder)"
        )
    traces = [read_rank(file) for file in files]
    for file, trace in zip(files, traces, strict=True):
        other = traces[0]
        if (trace.world, trace.steps) != (other.world, other.steps):
            raise UsageError(
                f"{file} is of {trace.steps} steps on {trace.world} ranks, {files[0].name} of "
                f"{other.steps} on "
                f"{other.world}; remove those of the older run"
            )
    return sorted(traces, key=lambda t: t.rank)


def compare(ranks: Sequence[RankTrace]) -> Comparison:
    """Put the traces of one run beside each other."""
    steps = ranks[0].steps
    waited: dict[int, float] = {trace.rank: 0.0 for trace in ranks}
    caused = dict(waited)
    blamed: dict[tuple[int, str], float] = defaultdict(float)
    rows: dict[tuple[str, str, int], Row] = {}
    # A key is the same collective of the same step on every rank.
    for key in {key for trace in ranks for key in trace.made}:
        here = {trace.rank: made for trace in ranks if (made := trace.made.get(key)) is not None}
        # Who spent least time in it came last; what it spent is the collective's own time.
        last = min(here, key=lambda rank: here[rank].taken)
        least = here[last].taken if len(here) > 1 else 0.0
        for rank, made in here.items():
            waiting = max(0.0, made.cost - least) if len(here) > 1 else 0.0
            waited[rank] += waiting / steps
            caused[last] += waiting / steps
            blamed[last, _said(made)] += waiting / steps
            _count(rows, rank, made, waiting, steps, len(ranks))
    for row in rows.values():
        row.worst = max(row._by_rank, key=lambda rank: row._by_rank[rank])
    ordered = sorted(rows.values(), key=lambda row: -row.cost)
    return Comparison(list(ranks), waited, ordered, _straggler(ranks, waited, caused, blamed))


def _said(made: Made) -> str:
    named = made.named
    op = named.op if named.peer is None else "messages"
    return op + (f" ({named.label})" if named.label else "")


def _count(
    rows: dict[tuple[str, str, int], Row],
    rank: int,
    made: Made,
    waiting: float,
    steps: int,
    ranks: int,
) -> None:
    named = made.named
    row = rows.setdefault(
        (named.title, named.label, named.bytes), Row(named.title, named.label, named.bytes)
    )
    row.calls += 1 / steps / ranks
    row.cost += made.cost / steps / ranks
    row.waiting += waiting / steps / ranks
    row._by_rank[rank] += made.cost


def _straggler(
    ranks: Sequence[RankTrace],
    waited: dict[int, float],
    caused: dict[int, float],
    blamed: dict[tuple[int, str], float],
) -> Straggler | None:
    # A rank that waited itself may be late because of another: that is deducted.
    rank = max(caused, key=lambda r: caused[r] - waited[r])
    others = [trace for trace in ranks if trace.rank != rank]
    mine = next(trace for trace in ranks if trace.rank == rank)
    if not others or caused[rank] - waited[rank] < NOTABLE * mine.total / mine.steps * len(others):
        return None
    # What the straggler does longer than the median of the others, by phase.
    longer = {
        p: (own - median(o.phases[p] for o in others)) / mine.steps
        for p, own in mine.phases.items()
    }
    phase = max(longer, key=lambda p: longer[p])
    mostly = max((said for r, said in blamed if r == rank), key=lambda said: blamed[rank, said])
    return Straggler(rank, caused[rank], mostly, phase, longer[phase])
