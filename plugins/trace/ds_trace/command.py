"""``dscore trace``: where the traced steps of a run went (torch-free)."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from ds_trace.all_ranks import Comparison, Row, Straggler


def trace(
    run: Annotated[
        Path,
        typer.Argument(metavar="RUN", help="The folder with the traces: torch_profiler.folder."),
    ],
    top: Annotated[
        int, typer.Option(min=1, metavar="N", help="How many collectives are listed.")
    ] = 10,
    as_json: Annotated[
        bool, typer.Option("--json", help="JSON instead of tables; times in milliseconds.")
    ] = False,
) -> None:
    """Say where the traced steps went: compute, waiting for which collective, idle; and which rank
    is the straggler.

    Exit codes:
      0: the traces were read

    Examples:
      dscore trace runs/first/traces
      dscore trace runs/first/traces --top 3 --json
    """
    from ds_command_kit.show import check_folder, show_json

    from ds_trace.all_ranks import compare, read_run

    check_folder(run)
    found = compare(read_run(run))
    if as_json:
        show_json(_plain(found))
        return
    _show(found, top)


def _plain(found: Comparison) -> dict[str, Any]:
    steps = found.ranks[0].steps
    return {
        "steps": steps,
        "world": found.ranks[0].world,
        "ranks": [
            {
                "rank": t.rank,
                "step": t.total / steps,
                "compute": t.compute / steps,
                "collectives": t.stalled / steps,
                "waiting": found.waited[t.rank],
                "idle": t.idle / steps,
                "phases": {phase: own / steps for phase, own in t.phases.items()},
            }
            for t in found.ranks
        ],
        "collectives": [
            {
                "operation": row.title,
                "label": row.label,
                "bytes": row.bytes,
                "calls": row.calls,
                "cost": row.cost,
                "waiting": row.waiting,
                "worst": row.worst,
            }
            for row in found.rows
        ],
        "straggler": None if found.straggler is None else asdict(found.straggler),
    }


def _show(found: Comparison, top: int) -> None:
    from ds_command_kit.show import show_table

    first = found.ranks[0]
    steps = first.steps
    phases = list(first.phases)
    missing = "" if len(found.ranks) == first.world else f" of {first.world}"
    typer.echo(
        f"{steps} steps, {len(found.ranks)}{missing} ranks on {first.device}; milliseconds per step"
    )
    columns = ["rank", "step", "compute", "collectives", "waiting", "idle", *phases]
    rows = []
    for t in found.ranks:
        times = [t.compute / steps, t.stalled / steps, found.waited[t.rank], t.idle / steps]
        step = t.total / steps
        shares = [f"{time:.1f} ({time / step:.0%})" for time in times]
        rows.append(
            [
                str(t.rank),
                f"{step:.1f}",
                *shares,
                *(f"{t.phases[phase] / steps:.1f}" for phase in phases),
            ]
        )
    show_table(columns, rows)
    if found.rows:
        typer.echo(
            "\ncollectives: what they cost the mean rank, and how much of it was waiting for other "
            "ranks"
        )
        show_table(
            ["collective", "for", "KiB", "calls", "cost", "waiting", "most on"],
            [_cells(row) for row in found.rows[:top]],
        )
        if rest := found.rows[top:]:
            typer.echo(f"and {len(rest)} others: {sum(row.cost for row in rest):.1f} ms")
    typer.echo("\n" + _verdict(found.straggler, len(found.ranks)))


def _cells(row: Row) -> list[str]:
    label = row.label if len(row.label) <= 48 else row.label[:45] + "..."
    figures = [
        f"{row.bytes / 1024:.1f}",
        f"{row.calls:.3g}",
        f"{row.cost:.1f}",
        f"{row.waiting:.1f}",
    ]
    return [row.title, label, *figures, f"rank {row.worst}"]


def _verdict(straggler: Straggler | None, ranks: int) -> str:
    if ranks == 1:
        return "one rank: nobody to wait for"
    if straggler is None:
        return "no straggler: no rank keeps the others waiting"
    where = (
        "between the phases (loading data, logging)"
        if straggler.phase == "between"
        else f"in {straggler.phase}"
    )
    longer = (
        f"; it spends {straggler.longer:.1f} ms more {where} than the others do"
        if straggler.longer > 0
        else ""
    )
    return (
        f"straggler: rank {straggler.rank}. The others together wait {straggler.caused:.1f} ms per "
        "step for it, mostly "
        f"in {straggler.mostly}{longer}"
    )
