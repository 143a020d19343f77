"""The screen of ``dscore top``, by rich."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Group
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ds_report.page.page import duration, short
from ds_report.run import GIB
from ds_report.top.live import RankNow, Snapshot
from ds_report.top.state import State

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

STYLES = {State.RUNNING: "bold cyan", State.FINISHED: "bold green", State.ENDED: "bold yellow"}
BLOCKS = "▁▂▃▄▅▆▇█"
PHASES = {"backward_inner": "backward", "backward_allreduce": "reduce"}
PLAIN_BLOCKS = "_.-=+*#%"


def screen(seen: Snapshot, console: Console) -> RenderableType:
    """The run, as large as the console is now."""
    width, height = console.size
    parts: list[RenderableType] = [_head(seen), _progress(seen, width), Text()]
    curves = _curves(
        seen, width, BLOCKS if console.encoding.lower().startswith("utf") else PLAIN_BLOCKS
    )
    parts.append(curves)
    taken = 8 + curves.row_count  # what is above the ranks, and the head of their table
    if seen.standing.text:
        parts.append(Text(seen.standing.text, style="red", overflow="fold"))
        taken += 1 + len(seen.standing.text) // max(width, 1)
    parts.append(
        _table(seen, max(1, height - taken) if console.is_terminal else len(seen.ranks), width)
    )
    return Group(*parts)


def _head(seen: Snapshot) -> Text:
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append(seen.name, style="bold").append("  ")
    text.append(seen.standing.state.value, style=STYLES.get(seen.standing.state, "bold red"))
    text.append(
        f"  {seen.world} rank{'s' if seen.world != 1 else ''}  {duration(seen.elapsed)}",
        style="dim",
    )
    return text


def _progress(seen: Snapshot, width: int) -> RenderableType:
    steps = Text(f"step {seen.step:,}", no_wrap=True)
    if not seen.total:
        return steps
    steps.append(f" of {seen.total:,}", style="dim")
    row = Table.grid(padding=(0, 2))
    bar = ProgressBar(
        total=seen.total, completed=min(seen.step, seen.total), width=max(10, min(40, width - 45))
    )
    left = Text(f"{duration(seen.left)} left" if math.isfinite(seen.left) else "", no_wrap=True)
    row.add_row(steps, bar, Text(f"{seen.step / seen.total:.0%}", style="dim"), left)
    return row


def _curves(seen: Snapshot, width: int, blocks: str) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(no_wrap=True, justify="right")
    table.add_column(no_wrap=True)
    size = max(8, min(60, width - 34))
    if seen.losses:
        table.add_row(
            "loss",
            Text(f"{seen.losses[-1]:.4g}", style="bold"),
            Text(spark(seen.losses, size, blocks), style="cyan"),
        )
    if seen.rates:
        middle = statistics.median(seen.rates[-50:])
        table.add_row(
            "samples/s",
            Text(short(middle), style="bold"),
            Text(spark(seen.rates, size, blocks), style="green"),
        )
    if math.isfinite(seen.tokens):
        table.add_row("tokens/s", Text(short(seen.tokens), style="bold"), "")
    if math.isfinite(seen.step_ms):
        table.add_row("ms per step", Text(short(seen.step_ms), style="bold"), "")
    if not table.row_count:
        table.add_row("no step is done yet", "", "")
    return table


def spark(values: Sequence[float], size: int, blocks: str = BLOCKS) -> str:
    """The course of `values` in `size` characters; each stands for the mean of its part."""
    if not values:
        return ""
    count = min(size, len(values))
    parts = [
        values[i * len(values) // count : (i + 1) * len(values) // count] for i in range(count)
    ]
    means = [statistics.fmean(part) for part in parts]
    low = min(means)
    high = max(means)
    scale = (len(blocks) - 1) / (high - low) if high > low else 0.0
    return "".join(blocks[round((v - low) * scale)] for v in means)


def _table(seen: Snapshot, room: int, width: int) -> RenderableType:
    table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 2 if width >= 72 else 1, 0, 0),
        header_style="dim",
    )
    for name, right in (
        ("rank", True),
        ("phase", False),
        ("step", True),
        ("waits", True),
        ("memory", False),
    ):
        table.add_column(name, justify="right" if right else "left", no_wrap=True)
    table.add_column("", overflow="ellipsis", no_wrap=True)
    rows = (
        sorted(seen.ranks, key=lambda r: (not (r.silent or r.straggler), r.rank))
        if len(seen.ranks) > room
        else seen.ranks
    )
    shown = rows[: max(1, room - 1)] if len(rows) > room else rows
    several = len({rank.host for rank in seen.ranks}) > 1
    for rank in sorted(shown, key=lambda r: r.rank):
        table.add_row(*_row(rank, seen, several, width))
    if len(rows) > len(shown):
        table.add_row("", Text(f"and {len(rows) - len(shown)} more ranks", style="dim"))
    return table


def _row(rank: RankNow, seen: Snapshot, several: bool, width: int) -> list[RenderableType]:
    long = math.isfinite(rank.seconds) and rank.seconds >= 1
    stuck = long and rank.seconds > max(
        30.0, 20 * (rank.step_ms if math.isfinite(rank.step_ms) else 0.0) / 1e3
    )
    phase = Text(
        PHASES.get(rank.phase, rank.phase),
        style="red" if rank.phase == "failed" else "yellow" if stuck else "",
    )
    if long:
        phase.append(f" {duration(rank.seconds)}", style="yellow" if stuck else "dim")
    note = Text(rank.host if several else "", style="dim")
    if rank.silent:
        note = Text("no sign of life", style="bold red")
    elif rank.straggler:
        note = Text("straggler: others wait for it" if width >= 90 else "straggler", style="yellow")
    return [
        str(rank.rank),
        phase,
        f"{rank.step:,}",
        f"{rank.wait:.0%}" if math.isfinite(rank.wait) else "",
        _memory(rank, seen.memory, width),
        note,
    ]


def _memory(rank: RankNow, total: float, width: int) -> RenderableType:
    if not math.isfinite(rank.allocated):
        return ""
    text = Text(f"{rank.allocated / GIB:.2f} GiB", no_wrap=True)
    if math.isfinite(rank.peak) and width >= 72:
        share = rank.peak / total if math.isfinite(total) and total > 0 else 0.0
        of = f" of {total / GIB:.0f}" if share and width >= 100 else ""
        text.append(f", peak {rank.peak / GIB:.2f}{of}", style="yellow" if share > 0.95 else "dim")
    return text
