"""``dscore verify``: is a script's run right? (torch-free until records are compared)."""

from __future__ import annotations

import json
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ds_verify.comparing import Report


def verify(
    script: Annotated[str, typer.Argument(help="The training script, which needs no change.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="The script's own arguments.")
    ] = None,
    world: Annotated[int, typer.Option(min=1, help="Processes of the run, on this host.")] = 2,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps that are compared.")] = 3,
    config: Annotated[
        Path | None,
        typer.Option(help="A config whose keys replace those of the script's config."),
    ] = None,
    against: Annotated[
        str,
        typer.Option(help='"one": one process; or a config file with the keys of another layout.'),
    ] = "one",
    limit: Annotated[
        float, typer.Option(min=1, help="Ratio to rounding above which a tensor is different.")
    ] = 8.0,
    module: Annotated[
        bool, typer.Option("--module", "-m", help="SCRIPT is a module, as in `python -m`.")
    ] = False,
    as_json: Annotated[
        Path | None, typer.Option("--json", help="Write all ratios to this file.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option(help="Write a page with a picture of the ratios to this file.")
    ] = None,
    keep: Annotated[
        Path | None, typer.Option(help="Keep the records in this folder, which must be new.")
    ] = None,
) -> None:
    """Say whether a script computes in its layout what one process computes.

    The script runs as it is on several processes, and its first steps are recorded. One process then
    computes the same micro-batches with the same weights, twice: once exactly, once with inputs that
    differ by one unit in the last place, which tells what rounding explains. Exits with 0 where all
    tensors are equal, with 1 where one differs, with 2 where the runs could not be made.
    """
    from ds_command_kit.show import CommandError

    from ds_core.config import read_config
    from ds_core.errors import DSError
    from ds_verify.runs import Script
    from ds_verify.runs import verify as make_runs

    with ExitStack() as stack:
        if keep is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dsverify-")))
        elif keep.exists():
            raise CommandError(f"--keep {keep}: it is there already; name a new folder")
        else:
            folder = keep.absolute()
        words = Script(("--module",) if module else (), script, tuple(arguments or ()))
        try:
            folders = make_runs(
                words,
                world,
                folder,
                config=read_config(config).raw if config is not None else {},
                against=None if against == "one" else read_config(Path(against)).raw,
                section={"steps": steps},
            )
            from ds_verify.comparing import compare_folders

            report = compare_folders(*folders, limit=limit)
        except DSError as error:
            # 1 means that a tensor differs, so nothing else may end with it.
            raise CommandError(str(error)) from error
    typer.echo(describe(report))
    if as_json is not None:
        as_json.write_text(json.dumps(as_data(report), indent=1), encoding="utf-8")
    if html is not None:
        from ds_verify.page import make_page

        html.write_text(make_page(report, script), encoding="utf-8")
    raise typer.Exit(0 if report.first is None else 1)


def describe(report: Report) -> str:
    """The verdict in a few lines."""
    ranks = len({row.rank for row in report.rows})
    steps = len({row.step for row in report.rows})
    plural = "s" if ranks > 1 else ""
    what = f"{len(report.rows)} tensors of {steps} steps on {ranks} rank{plural}"
    first = report.first
    if first is None:
        text = f"equal: {what}, largest ratio {report.largest:.2g} of rounding"
        top = max(report.rows, key=lambda row: row.ratio)
        if top.ratio:
            text += f" ({_name(top)})"
        return "\n".join([text, *_skipped(report)])
    wrong = report.wrong
    ranks_of = sorted({r.rank for r in wrong if r.name == first.name and r.kind == first.kind})
    before = report.rows[: report.rows.index(first)]
    kinds: dict[str, int] = {}
    for row in before:
        if row.ratio <= report.limit:
            kinds[row.kind] = kinds.get(row.kind, 0) + 1
    equal = ", ".join(f"{count} {kind}" for kind, count in kinds.items()) or "nothing"
    lines = [
        f"different: {_name(first)}",
        f"  it differs by {first.relative:.2g} of its norm, {first.ratio:.3g} times what rounding "
        f"explains (limit {report.limit:g}); its norm is {first.norm:.4g}, the reference's "
        f"{first.reference:.4g}",
        f"  on ranks: {', '.join(map(str, ranks_of))} of {report.facts.get('world')}",
        f"  equal before it: {equal}",
        f"  what usually causes this: {report.cause}",
        f"  {len(wrong)} of {what} differ",
    ]
    return "\n".join([*lines, *_skipped(report)])


def _name(row: object) -> str:
    from ds_verify.comparing import Difference

    assert isinstance(row, Difference)
    micro = f", micro-batch {row.micro}" if row.kind in MICRO else ""
    return (
        f"{KIND_NAMES.get(row.kind, row.kind)} {row.name}, step {row.step}{micro}, rank {row.rank}"
    )


MICRO = ("forward", "backward", "local gradient")
KIND_NAMES = {
    "forward": "forward of",
    "backward": "backward, gradient of",
    "local gradient": "local gradient of",
    "gradient": "gradient of",
    "norm": "norm:",
    "state": "state",
    "weight": "weight",
}


def _skipped(report: Report) -> list[str]:
    if not report.skipped:
        return []
    shown = ", ".join(report.skipped[:3])
    more = f" and {len(report.skipped) - 3} others" if len(report.skipped) > 3 else ""
    return [f"  not compared, since the layouts have them in different shapes: {shown}{more}"]


def as_data(report: Report) -> dict[str, object]:
    """The report as plain data; a ratio that is infinite is null."""
    import math
    from dataclasses import asdict

    def row(difference: object) -> dict[str, object]:
        data = asdict(difference)  # type: ignore[call-overload]
        return {
            k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in data.items()
        }

    first = report.first
    return {
        "equal": first is None,
        "limit": report.limit,
        "largest_ratio": report.largest if math.isfinite(report.largest) else None,
        "first": None if first is None else row(first),
        "cause": report.cause,
        "layout": dict(report.facts),
        "skipped": list(report.skipped),
        "tensors": [row(each) for each in report.rows],
    }


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command(context_settings={"allow_interspersed_args": False})(verify)
