"""``dscore curriculum``: measure a dataset, and look at schedules before anything runs."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from ds_command_kit.config_code import Imports, read_to_look_at

app = typer.Typer(no_args_is_help=True, add_completion=False)


@app.callback()
def curriculum() -> None:
    """Measure datasets, and look at curricula."""


@app.command()
def draw(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="The config of a run.")],
    steps: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="How many steps. Default: to the end.")
    ] = None,
    svg: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a drawing to this file as well.")
    ] = None,
    imports: Imports = False,
) -> None:
    """Show which difficulty each step has, and how many samples are easy enough for it.

    Exit codes:
      0: the schedule is shown
      1: the config is wrong

    Examples:
      dscore curriculum draw ds_config.json
      dscore curriculum draw ds_config.json --steps 1000 --svg curriculum.svg
    """
    from ds_core.config import load_config
    from ds_core.errors import UsageError
    from ds_data_sampling.curricula.drawing import as_svg, as_text, curves_of, schedules_of

    _, chosen = load_config(read_to_look_at(config, imports), fill_later=True)
    schedules = schedules_of(chosen)
    if not schedules:
        raise UsageError(f"{config} has no curriculum, or none that is enabled")
    curves = curves_of(schedules, steps)
    typer.echo(as_text(curves))
    if svg is not None:
        svg.write_text(as_svg(curves), encoding="utf-8")
        typer.echo(f"drawn in {svg}")


Dataset = Annotated[
    str,
    typer.Argument(
        metavar="DATASET",
        help="package.module:name of the dataset, or of a function that returns it.",
    ),
]
Folder = Annotated[
    Path,
    typer.Option("--output", "-o", metavar="FOLDER", help="Where the files of the metrics go."),
]
Metric = Annotated[
    list[str],
    typer.Option(
        "--metric",
        "-m",
        metavar="METRIC",
        help="seqlen, vocabulary, vocabularyrarity or NAME=package.module:function.",
    ),
]
Processes = Annotated[
    int,
    typer.Option("--processes", "-p", min=0, metavar="N", help="That load and measure samples."),
]
BatchSize = Annotated[
    int, typer.Option(min=1, metavar="N", help="Samples that a process takes at a time.")
]
Worker = Annotated[
    int | None,
    typer.Option(min=0, metavar="N", help="Measure only the part of this worker, of --workers."),
]
Workers = Annotated[int, typer.Option(min=1, metavar="N", help="Jobs that share the dataset.")]
Combine = Annotated[
    bool, typer.Option("--combine", help="Put the parts of --workers workers together.")
]


@app.command()
def analyze(
    dataset: Dataset,
    folder: Folder,
    metric: Metric,
    processes: Processes = 0,
    batch_size: BatchSize = 256,
    worker: Worker = None,
    workers: Workers = 1,
    combine: Combine = False,
) -> None:
    """Measure each sample of a dataset, and write the index files for curricula and token budgets.

    Jobs on several hosts: `--workers N --worker I` for each I below N, then `--workers N
    --combine`.

    Exit codes:
      0: the metrics are written
      1: the dataset or a metric cannot be loaded

    Examples:
      dscore curriculum analyze mine.data:train -o metrics -m seqlen
      dscore curriculum analyze mine.data:train -o metrics -m seqlen -p 8
    """
    from ds_core.errors import UsageError
    from ds_data_sampling.curricula import analysis

    sys.path.insert(0, os.getcwd())  # modules beside which the command is run
    data = _dataset(dataset)
    if combine:
        measures = analysis.measures_of(metric, folder)
        found = analysis.combine(folder, measures, len(data), workers=workers)
    elif worker is None:
        if workers > 1:
            raise UsageError("--workers needs --worker, or --combine when all workers have ended")
        found = analysis.analyze(data, metric, folder, batch_size=batch_size, processes=processes)
    else:
        measures = analysis.measures_of(metric, folder)
        measure_part = functools.partial(analysis.measure, worker=worker, workers=workers)
        measure_part(data, measures, folder, batch_size=batch_size, processes=processes)
        typer.echo(f"worker {worker} of {workers} has measured its part")
        return
    for name, facts in found.items():
        typer.echo(_line(folder / name, facts))


def _dataset(reference: str) -> Any:
    from ds_core.entries import resolve
    from ds_core.errors import UsageError

    found: Any = resolve(reference)
    if isinstance(found, type) or (callable(found) and not hasattr(found, "__getitem__")):
        build: Callable[[], Any] = found
        found = build()
    if not (hasattr(found, "__len__") and hasattr(found, "__getitem__")):
        raise UsageError(
            f"{reference} is a {type(found).__name__}; a dataset with len() and [] is needed"
        )
    return found


def _line(folder: Path, facts: dict[str, Any]) -> str:
    if "percentiles" not in facts:
        return f"{folder}: {facts['kind']} over {facts['samples']} samples"
    low, middle, high = (facts["percentiles"][percent] for percent in ("0", "50", "100"))
    return (
        f"{folder}: {facts['samples']} samples from {low:g} to {high:g}, half of them up to "
        f"{middle:g}"
    )
