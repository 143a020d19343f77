"""``dscore io``: which settings suit a disk (torch-free)."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from ds_command_kit.show import CommandError, check_folder, show_json, show_table

from ds_core.errors import DSError
from ds_nvme.engines import Settings
from ds_nvme.files import RunFolder
from ds_nvme.measure import Speed, measure
from ds_nvme.probe import direct, open_engine, probe

MIB = 1 << 20
BLOCKS = (MIB, MIB // 4, MIB // 2, 4 * MIB, 8 * MIB)
DEPTHS = (8, 2, 4, 16, 32)
THREADS = (1, 2, 4)
"""What is tried, the defaults first: another value must be faster by a twentieth to be taken."""

app = typer.Typer(
    help="Measure a disk, and find the settings of the section aio for it.",
    no_args_is_help=True,
    add_completion=False,
)
"""The group ``dscore io``."""


@app.callback()
def group() -> None:
    """Measure a disk, and find the settings of the section aio for it."""


@dataclass(frozen=True, slots=True)
class _Row:
    engine: str
    settings: Settings
    speed: Speed | None
    why: str = ""

    @property
    def rate(self) -> float:
        """Of a step, which reads as much as it writes."""
        return 2 / (1 / self.speed.write + 1 / self.speed.read) if self.speed is not None else 0.0


Folder = Annotated[
    Path,
    typer.Argument(
        metavar="[FOLDER]", help="A folder on the disk, as for nvme_path. Default: this one."
    ),
]
Size = Annotated[
    int,
    typer.Option(metavar="MIB", help="MiB of the file that is written and read.", min=1),
]
Seconds = Annotated[
    float, typer.Option(metavar="SECONDS", help="About how long all of it may take.", min=1)
]
AsJson = Annotated[bool, typer.Option("--json", help="JSON instead of a table.")]


@app.command("bench")
def bench(
    folder: Folder = Path(),
    size: Size = 256,
    seconds: Seconds = 30,
    as_json: AsJson = False,
) -> None:
    """Measure engines, block sizes, queue depths and numbers of threads; print the best ones for
    the config.

    Exit codes:
      0: the best settings are printed
      2: wrong usage, or the disk cannot be used

    Examples:
      dscore io bench /local_nvme
      dscore io bench /local_nvme --size 1024 --seconds 60
    """
    check_folder(folder)
    own = None
    try:
        own = RunFolder(folder)
        if own.free() < 2 * size * MIB:
            raise CommandError(
                f"{folder} has {own.free() // MIB} MiB free; --size {size} needs twice as much as "
                "it says"
            )
        rows = list(_search(own.path, size * MIB, seconds))
        by_cache = not direct(own.path)
    except DSError as error:
        raise CommandError(str(error)) from error
    finally:
        if own is not None:
            own.close()
    best = _best(rows)
    found = best.settings
    section = {
        "block_size": found.block_size,
        "queue_depth": found.queue_depth,
        "intra_op_parallelism": found.threads,
        **(
            {"engine": best.engine}
            if best.engine != next(r.engine for r in rows if r.speed)
            else {}
        ),
    }
    if as_json:
        show_json({"direct": not by_cache, "aio": section, "measured": [_json(r) for r in rows]})
        return
    show_table(
        ("engine", "block_size", "queue_depth", "threads", "write MB/s", "read MB/s"),
        [_cells(r) for r in rows],
    )
    if by_cache:
        typer.echo("the file system has no direct I/O: these are speeds of the page cache too")
    typer.echo(f'\n"aio": {json.dumps(section)}')


def _search(folder: Path, nbytes: int, seconds: float) -> Iterator[_Row]:
    """First the engines with the defaults, then one setting after the other with the best engine so
    far.
    """
    start = time.monotonic()
    rows = []
    # There are about forty measurements in all.
    each = max(0.05, min(1.0, seconds / 40))
    for found in probe(folder, Settings()):
        speed = None
        if found.engine is not None:
            speed = measure(folder, found.engine, nbytes=nbytes, seconds=each)
            found.engine.close()
        rows.append(_Row(found.name, Settings(), speed, found.why))
        yield rows[-1]
    # One setting after the other: all combinations would take minutes.
    for key, values in (("block_size", BLOCKS), ("queue_depth", DEPTHS), ("threads", THREADS)):
        best = _best(rows)
        for value in values[1:]:
            if time.monotonic() - start > seconds:
                return
            wanted = _with(best.settings, key, value)
            engine = open_engine(best.engine, wanted)
            rows.append(
                _Row(best.engine, wanted, measure(folder, engine, nbytes=nbytes, seconds=each))
            )
            engine.close()
            yield rows[-1]


def _with(settings: Settings, key: str, value: int) -> Settings:
    """`settings` with another value of a number."""
    numbers = {
        "block_size": settings.block_size,
        "queue_depth": settings.queue_depth,
        "threads": settings.threads,
    }
    numbers[key] = value
    return Settings(numbers["block_size"], numbers["queue_depth"], numbers["threads"])


def _best(rows: list[_Row]) -> _Row:
    best = rows[0]
    for row in rows[1:]:
        # Less is noise, and the defaults are kept.
        if row.rate > 1.05 * best.rate:
            best = row
    if best.speed is None:
        raise CommandError("; ".join(f"{r.engine}: {r.why}" for r in rows))
    return best


def _cells(row: _Row) -> list[str]:
    s = row.settings
    settings = [row.engine, str(s.block_size), str(s.queue_depth), str(s.threads)]
    if row.speed is None:
        return [*settings, row.why, ""]
    return [*settings, f"{row.speed.write / 1e6:.0f}", f"{row.speed.read / 1e6:.0f}"]


def _json(row: _Row) -> dict[str, object]:
    s = row.settings
    return {
        "engine": row.engine,
        "block_size": s.block_size,
        "queue_depth": s.queue_depth,
        "threads": s.threads,
        **(
            {"write": row.speed.write, "read": row.speed.read}
            if row.speed is not None
            else {"why": row.why}
        ),
    }
