"""``dscore pipeline``: look at schedules before anything runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True)


@app.callback()
def pipeline() -> None:
    """Look at pipeline schedules."""


@app.command()
def draw(
    schedule: Annotated[
        str,
        typer.Argument(help="1f1b, interleaved, zero_bubble, inference or package.module:Class."),
    ] = "1f1b",
    stages: Annotated[int, typer.Option("--stages", "-s", min=1, help="Pipeline stages.")] = 4,
    micro_batches: Annotated[
        int, typer.Option("--micro-batches", "-m", min=1, help="Per batch.")
    ] = 8,
    chunks: Annotated[
        int, typer.Option("--chunks", "-c", min=1, help="Parts of the model per stage.")
    ] = 1,
    forward: Annotated[
        float, typer.Option(min=0.1, help="Time of one forward of one chunk.")
    ] = 1.0,
    backward: Annotated[
        float, typer.Option(min=0.1, help="Time of one backward; each half takes half.")
    ] = 2.0,
    svg: Annotated[Path | None, typer.Option(help="Write a drawing to this file as well.")] = None,
) -> None:
    """Check a schedule, and draw what each stage does when."""
    from ds_command_kit.show import say_error

    from ds_core.errors import UsageError
    from ds_core.plugins import Plugins
    from ds_pipeline.schedules.choose import find_schedule, make_schedule
    from ds_pipeline.schedules.timeline import as_svg, as_text, titled
    from ds_pipeline.schedules.validate import ScheduleError, check

    train = schedule != "inference"
    if schedule == "interleaved" and chunks == 1:
        chunks = 2
    try:
        make = find_schedule(schedule, Plugins()) if train else None
        proof = check(
            lambda stage: make_schedule(
                schedule, micro_batches, stages, stage, chunks, train=train, make=make
            ),
            train=train,
            forward=forward,
            backward=backward,
        )
    except (ScheduleError, UsageError) as error:
        say_error(str(error))
        raise typer.Exit(1) from None
    print(as_text(proof))
    if svg is not None:
        svg.write_text(as_svg(proof, titled(schedule, stages, chunks, micro_batches)))
        print(f"drawn in {svg}")
