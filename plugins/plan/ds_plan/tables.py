"""A plan as a table, as JSON and as drawings."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from ds_command_kit.show import show_json, show_list, show_table

from ds_core.errors import UsageError
from ds_plan.advice import format_gigabytes
from ds_plan.needs import Kinds, Need

if TYPE_CHECKING:
    from ds_core.entries import Chart
    from ds_plan.activations import Activations
    from ds_plan.advice import Advice
    from ds_plan.comparison import Line, Snapshot
    from ds_plan.run import PlannedRun


@dataclass(frozen=True, slots=True)
class Exchange:
    """What the optimizer takes to collect whole matrices, on the rank with the most."""

    stages: str

    sent: int
    """Bytes that it sends per step, besides those of `Need.sent`."""

    held: int
    """Bytes of whole matrices, and of what comes of them, during the step."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What the command predicts for one model and one config."""

    parameters: int
    """Elements of the undivided model."""

    run: PlannedRun

    tensor_parallel: int
    """Ranks over which matrices are divided."""

    activations: Activations | None
    """Of one micro-batch; None where they were not asked for."""

    needs: Sequence[Need]
    """The choices, in the order of the table."""

    advice: Advice | None
    """None without the memory of a device."""

    charts: Sequence[Chart]
    """What plugins show of the config besides."""

    exchanges: Sequence[Exchange] = ()
    """Of an optimizer that collects matrices."""


def show_plan_as_json(plan: Plan) -> None:
    """Print everything, in bytes and elements."""
    advice = plan.advice
    recommended = None
    if advice is not None and advice.need is not None:
        recommended = list(plan.needs).index(advice.need)
    show_json(
        {
            "parameters": plan.parameters,
            "world": plan.run.world,
            "tensor_parallel": plan.tensor_parallel,
            "gradient_accumulation_steps": plan.run.gas,
            "activations": None if plan.activations is None else asdict(plan.activations),
            "choices": [_as_dict(need) for need in plan.needs],
            "recommended": recommended,
            "reason": None if advice is None else advice.reason,
            "optimizer_exchanges": [asdict(exchange) for exchange in plan.exchanges],
            "charts": [{"name": c.name, "title": c.title, "text": c.text} for c in plan.charts],
        }
    )


def _as_dict(need: Need) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(
        json.dumps(asdict(need), default=lambda offload: offload.value)
    )
    return {**plain, "device_peak": need.device.peak, "host_peak": need.host.peak}


def show_plan(plan: Plan, *, verbose: bool = False) -> None:
    """Print the table of the choices, activations, the advice, and the text of the charts.

    verbose: what makes up the bytes of the device, too.
    """
    divided = ""
    if plan.tensor_parallel > 1:
        divided = f", each {plan.tensor_parallel} that divide matrices evenly"
    typer.echo(
        f"{plan.parameters:,} parameters on {plan.run.world} ranks{divided}; "
        "GB of each rank, without activations"
    )
    _show_choices(plan)
    if verbose:
        typer.echo("what the device holds:")
        show_list([_kinds_of(need) for need in plan.needs])
    if plan.activations is not None:
        typer.echo(
            f"activations of a rank's {plan.activations.tokens:,} tokens, undivided layers: "
            f"{_describe(plan.activations)}"
        )
    for exchange in plan.exchanges:
        typer.echo(
            f"the optimizer collects matrices, stage {exchange.stages}: a rank sends up to "
            f"{gigabytes(exchange.sent)} GB more per step, and holds {gigabytes(exchange.held)} GB "
            "of them in it, which the table has not"
        )
    if plan.advice is not None:
        typer.echo(plan.advice.reason)
    for chart in plan.charts:
        typer.echo(f"\n{chart.title}\n{chart.text}")


KINDS = ("weights", "gradients", "masters", "states", "step", "buckets", "gathered")
"""The names of `Kinds`, in the order of its fields."""
_COLUMNS = tuple(zip(KINDS, fields(Kinds), strict=True))


def _show_choices(plan: Plan) -> None:
    advised = None if plan.advice is None else plan.advice.need
    # Traffic between blocks of ranks is a column only where the config makes blocks.
    in_blocks = any(need.across for need in plan.needs)
    traffic = ("sent", "across") if in_blocks else ("sent per step",)
    rows = []
    for need in plan.needs:
        mark = "> " if need is advised else ""
        row = [f"{mark}{need.stage}", need.offload.value]
        row += [gigabytes(need.device.peak), gigabytes(need.host.peak), gigabytes(need.disk)]
        row.append(gigabytes(need.sent))
        if in_blocks:
            row.append(gigabytes(need.across))
        rows.append(tuple(row))
    show_table(("stage", "offloaded", "device", "host", "disk", *traffic), rows)


def _kinds_of(need: Need) -> tuple[str, str, str]:
    """The parts of `need.device`, but for those of which there is nothing."""
    sizes = ((kind, getattr(need.device, field.name)) for kind, field in _COLUMNS)
    parts = ", ".join(f"{kind} {gigabytes(size)}" for kind, size in sizes if size)
    return str(need.stage), f"{need.offload.value}: {parts or 'nothing'}", ""


def _describe(activations: Activations) -> str:
    kept = f"{gigabytes(activations.kept)} GB"
    if activations.recomputed is None:
        return kept
    return f"{kept}, {gigabytes(activations.recomputed)} GB with its blocks recomputed"


def show_comparison(need: Need, snapshot: Snapshot, lines: Sequence[Line], as_json: bool) -> None:
    """Print what was planned beside what the rank of `snapshot` held."""
    if as_json:
        show_json({"rank": snapshot.rank, "kinds": [asdict(line) for line in lines]})
        return
    typer.echo(
        f"rank {snapshot.rank} on {snapshot.device}, stage {need.stage}, "
        f"{need.offload.value} on the host; GB"
    )
    rows = [
        (
            line.kind,
            gigabytes(line.planned),
            gigabytes(line.measured),
            _signed(line.measured - line.planned),
            line.why,
        )
        for line in lines
    ]
    show_table(("between backward and step", "planned", "measured", "difference", "why"), rows)


def draw(charts: Sequence[Chart], folder: Path | None) -> None:
    """Write the drawings, and their paths to stderr: stdout may be JSON. None: draw nothing."""
    if folder is None:
        return
    drawn = [chart for chart in charts if chart.svg is not None]
    if not drawn:
        raise UsageError("--svg-folder: no plugin draws anything of this config")
    if not folder.parent.is_dir():
        raise UsageError(f"--svg-folder: no such folder: {str(folder.parent)!r}")
    folder.mkdir(exist_ok=True)
    for chart in drawn:
        path = folder / f"{chart.name}.svg"
        path.write_text(chart.svg or "")
        typer.echo(f"drawn in {path}", err=True)


def gigabytes(size: int) -> str:
    """Bytes in GB, with three digits or more."""
    return format_gigabytes(size) if size else "0"


def _signed(size: int) -> str:
    return f"{'-' if size < 0 else '+'}{gigabytes(abs(size))}" if size else "0"
