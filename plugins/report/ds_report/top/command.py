"""``dscore top``."""

from __future__ import annotations

import math
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from ds_command_kit.show import CommandError, check_folder

from ds_report.page.page import duration, short
from ds_report.reading import rank_files
from ds_report.run import GIB
from ds_report.top.live import Snapshot, Watch
from ds_report.top.state import State


def top(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="The folder of a record (run_record.folder).")
    ],
    every: Annotated[
        float, typer.Option(min=0.1, max=3600, metavar="SECONDS", help="Time between two looks.")
    ] = 1.0,
    once: Annotated[
        bool, typer.Option("--once", help="Show the run as it is now, and end.")
    ] = False,
) -> None:
    """Watch a run until it ends, or until Ctrl-C.

    Without a terminal: a line whenever there are new steps.

    Exit codes:
      0: the run has ended well, or still runs
      1: the run has failed or died

    Examples:
      dscore top runs/first
      dscore top runs/first --once
    """
    check_folder(run)
    if not rank_files(run):
        raise CommandError(
            f"{str(run)!r} holds no record of a run (rank0.jsonl); train with "
            '"run_record": {"folder": ...} in the config, or `dscore run --record FOLDER`'
        )
    watch = Watch(run)
    try:
        if once:
            seen = watch.look()
            _show(seen) if sys.stdout.isatty() else _print_all(seen)
        elif sys.stdout.isatty():
            seen = _live(watch, every)
            typer.echo(line_of(seen))
        else:
            seen = _lines(watch, every)
    except OSError as error:
        raise CommandError(f"{run}: {error}") from error
    if seen.standing.state in (State.FAILED, State.DIED):
        raise typer.Exit(1)


def _live(watch: Watch, every: float) -> Snapshot:
    """On a terminal: a screen of its own, until the run ends or the user has seen enough."""
    from rich.console import Console
    from rich.live import Live

    from ds_report.top.screen import screen

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    console = Console()
    before = signal.signal(signal.SIGTERM, stop)  # the terminal must be put back
    seen = watch.look()
    try:
        with Live(screen(seen, console), console=console, screen=True, auto_refresh=False) as live:
            while not seen.over:
                time.sleep(every)
                seen = watch.look()
                live.update(screen(seen, console), refresh=True)
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGTERM, before)
    return seen


def _show(seen: Snapshot) -> None:
    from rich.console import Console

    from ds_report.top.screen import screen

    console = Console()
    console.print(screen(seen, console))


def _lines(watch: Watch, every: float) -> Snapshot:
    """Without a terminal: one line whenever there is something new."""
    said = ""
    seen = watch.look()
    try:
        while True:
            head = f"{seen.step} {seen.standing}"
            if head != said:
                typer.echo(f"{time.strftime('%H:%M:%S')} {line_of(seen)}")
                sys.stdout.flush()
                said = head
            if seen.over:
                break
            time.sleep(every)
            seen = watch.look()
    except KeyboardInterrupt:
        pass
    return seen


def _print_all(seen: Snapshot) -> None:
    typer.echo(line_of(seen))
    for rank in seen.ranks:
        words = [f"rank {rank.rank}", f"step {rank.step}", _doing(rank.phase, rank.seconds)]
        words += [f"{short(rank.step_ms)} ms per step"] if rank.step_ms == rank.step_ms else []
        words += [f"waits {rank.wait:.0%}"] if rank.wait == rank.wait else []
        words += [f"{rank.allocated / GIB:.2f} GiB"] if rank.allocated == rank.allocated else []
        words += ["no sign of life"] if rank.silent else []
        words += ["straggler"] if rank.straggler else []
        typer.echo("  " + ", ".join(words))


def _doing(phase: str, seconds: float) -> str:
    return f"{phase} for {duration(seconds)}" if seconds == seconds and seconds >= 1 else phase


def line_of(seen: Snapshot) -> str:
    """A run in one line."""
    words = [
        f"{seen.name}: {seen.standing.state.value}",
        f"step {seen.step}" + (f" of {seen.total}" if seen.total else ""),
    ]
    words += [f"loss {seen.losses[-1]:.4g}"] if seen.losses else []
    words += [f"{short(_middle(seen.rates))} samples/s"] if seen.rates else []
    words += [f"{short(seen.tokens)} tokens/s"] if seen.tokens == seen.tokens else []
    peaks = [rank.peak for rank in seen.ranks if rank.peak == rank.peak]
    words += [f"{max(peaks) / GIB:.2f} GiB at peak"] if peaks else []
    words += [f"{duration(seen.left)} left"] if seen.left == seen.left else []
    stragglers = [str(rank.rank) for rank in seen.ranks if rank.straggler]
    words += [f"straggler: rank {', '.join(stragglers)}"] if stragglers else []
    words += [seen.standing.text] if seen.standing.text else []
    return ", ".join(words)


def _middle(values: Sequence[float]) -> float:
    return statistics.median(values[-50:]) if values else math.nan
