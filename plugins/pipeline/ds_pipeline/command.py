"""``dscore pipeline``: look at schedules before anything runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, add_completion=False)


@app.callback()
def pipeline() -> None:
    """Look at pipeline schedules."""


Schedule = Annotated[
    str,
    typer.Argument(
        metavar="[SCHEDULE]",
        help="1f1b, interleaved, zero_bubble, inference or package.module:Class.",
    ),
]
Stages = Annotated[int, typer.Option("--stages", "-s", min=1, metavar="N", help="Pipeline stages.")]
MicroBatches = Annotated[
    int, typer.Option("--micro-batches", "-m", min=1, metavar="N", help="Per batch.")
]
Chunks = Annotated[
    int,
    typer.Option("--chunks", "-c", min=1, metavar="N", help="Parts of the model per stage."),
]
Forward = Annotated[float, typer.Option(min=0.1, help="Time of one forward of one chunk.")]
Backward = Annotated[
    float, typer.Option(min=0.1, help="Time of one backward; each half takes half.")
]
Svg = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write a drawing to this file as well.")
]


@app.command()
def draw(
    schedule: Schedule = "1f1b",
    stages: Stages = 4,
    micro_batches: MicroBatches = 8,
    chunks: Chunks = 1,
    forward: Forward = 1.0,
    backward: Backward = 2.0,
    svg: Svg = None,
) -> None:
    """Check a schedule, and draw what each stage does when.

    Exit codes:
      0: the schedule is valid
      1: it is not, and stderr says where

    Examples:
      dscore pipeline draw
      dscore pipeline draw zero_bubble --stages 2 --micro-batches 3
      dscore pipeline draw interleaved --chunks 2 --svg schedule.svg
    """
    from ds_command_kit.show import say_error

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
    except ScheduleError as error:
        say_error(str(error))
        raise typer.Exit(1) from None
    print(as_text(proof))
    if svg is not None:
        svg.write_text(as_svg(proof, titled(schedule, stages, chunks, micro_batches)))
        print(f"drawn in {svg}")
