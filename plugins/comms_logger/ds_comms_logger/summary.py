"""The table of what communication cost, and how far the slowest rank is behind the fastest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from ds_comms_logger.log import CommsRow, installed_log
from ds_core import comm


def log_summary(show_straggler: bool = False, *, show: bool = True) -> list[CommsRow]:
    """Print the summary on rank 0 and return this rank's rows; empty when the log is off.

    show_straggler: also how far the slowest rank is behind the fastest, per row; collective then,
        so that every rank must call it.
    show: print; the same on every rank.
    """
    log = installed_log()
    rows = log.rows() if log is not None else []
    if show_straggler:
        rows = _with_stragglers(rows)
    if show and comm.rank() == 0:
        _show(rows, show_straggler)
    return rows


def _with_stragglers(rows: Iterable[CommsRow]) -> list[CommsRow]:
    """`rows` with the spread of total time over the ranks that have the same row."""
    rows = list(rows)
    if (log := installed_log()) is not None:
        comm.remove_interceptor(log)  # the exchange itself is not part of what is measured
    try:
        everyone = comm.all_gather_json(
            [[row.op, row.site, row.bytes, row.total_ms] for row in rows]
        )
    finally:
        if log is not None:
            comm.add_interceptor(log)
    totals: dict[tuple[str, str, int], list[float]] = {}
    for op, site, size, total in (entry for entries in everyone for entry in entries):
        totals.setdefault((op, site, size), []).append(total)
    return [_among(row, totals[row.op, row.site, row.bytes]) for row in rows]


def _among(row: CommsRow, totals: Sequence[float]) -> CommsRow:
    """`row` with what the other ranks' total times say about it."""
    return replace(row, straggler_ms=max(totals) - min(totals), fastest_ms=min(totals))


def _show(rows: Sequence[CommsRow], straggler: bool) -> None:
    """Print a table; without a column of call sites where there are none."""
    heads = ["op", "site", "bytes", "count", "total ms", "avg ms", "algbw GB/s", "busbw GB/s"]
    cells = []
    for row in rows:
        figures = [row.total_ms, row.average_ms, row.algbw, row.busbw]
        figures += [row.straggler_ms or 0.0] if straggler else []
        cells.append(
            [
                row.op,
                row.site,
                str(row.bytes),
                str(row.count),
                *(f"{figure:.3f}" for figure in figures),
            ]
        )
    if straggler:
        heads.append("straggler ms")
    # Without `debug` there are no call sites to show.
    if not any(row.site for row in rows):
        heads.pop(1)
        for line in cells:
            line.pop(1)
    widths = [max(len(line[i]) for line in [heads, *cells]) for i in range(len(heads))]
    for line in [heads, *cells]:
        texts = (
            c.ljust(w) if i == 0 else c.rjust(w)
            for i, (c, w) in enumerate(zip(line, widths, strict=True))
        )
        print("  ".join(texts).rstrip())
