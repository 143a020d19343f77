"""The page: runs in, one HTML text out that needs nothing else.

[Note: nothing from outside] Every text of a run is escaped by the template, and the numbers stand
in a block of JSON without ``<``. The page's content security policy allows no connection, and only
the script whose checksum it names.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from ds_report.page.chart import Chart, Line
from ds_report.page.thin import means, thin
from ds_report.reading import number
from ds_report.run import ELAPSED, Points, Run

COLOURS = 8
KNOWN = (
    ("loss", "Loss", "", False),
    ("lr", "Learning rate", "", True),
    ("grad_norm", "Gradient norm", "", False),
    ("samples_per_second", "Throughput", "samples/s", True),
    ("tokens_per_second", "Tokens", "tokens/s", True),
    ("step_time_ms", "Time per step", "ms", True),
    ("eval/loss", "Evaluation loss", "", False),
    ("loss_scale", "Loss scale", "", False),
    ("skipped_steps", "Skipped steps", "", True),
)
"""Metric, title, unit, whether y begins at 0."""
SHOWN_ELSEWHERE = {"skipped", "memory_allocated_gib", "memory_peak_gib", "elapsed_time_ms"}
MOST_CHARTS = 80
MOST_RANKS = 16
ASSETS = Path(__file__).parents[1] / "assets"


def page(runs: Sequence[Run], title: str = "") -> str:
    """The whole page."""
    import jinja2

    script = (ASSETS / "report.js").read_text(encoding="utf-8")
    loader = jinja2.FileSystemLoader(ASSETS)
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    environment.filters |= {"duration": duration, "short": short, "gib": _gib, "number": number}
    base = "step" if all(run.base == "step" for run in runs) else "samples"
    charts = list(_charts(runs, base))
    known = {key for key, *_ in KNOWN} | {"memory"}
    return environment.get_template("report.html.j2").render(
        title=title
        or (f"Training run {runs[0].name}" if len(runs) == 1 else f"{len(runs)} training runs"),
        made=time.strftime("%Y-%m-%d %H:%M"),
        version=metadata.version("dscore-report"),
        runs=runs,
        colours=COLOURS,
        charts=[c for c in charts if c.key in known],
        more=[c for c in charts if c.key not in known],
        axes=_axes(runs, base),
        base=base,
        phases=_phase_bars(runs),
        differences=differences(runs),
        configs=[
            json.dumps(run.facts.get("config"), indent=2) if run.facts.get("config") else ""
            for run in runs
        ],
        isfinite=math.isfinite,
        when=_when,
        style=_safe((ASSETS / "report.css").read_text(encoding="utf-8")),
        script=_safe(script),
        script_hash="sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        data=_safe(_json(_data(runs, charts, base))),
    )


def _safe(text: str) -> Any:
    from markupsafe import Markup

    return Markup(text)


# -- curves ----------------------------------------------------------------------------------------


def _charts(runs: Sequence[Run], base: str) -> Iterator[Chart]:
    for key, title, unit, zero in KNOWN:
        lines = _lines(runs, key, base)
        steady = (
            key in ("loss_scale", "skipped_steps")
            and len({v for line in lines for v in line.y}) < 2
        )
        if lines and not steady:
            yield _chart(key, title, unit, lines, zero)
        if key == "step_time_ms" and (memory := _memory_lines(runs, base)):
            many = any(len(run.memory) > MOST_RANKS for run in runs)
            note = f"the first {MOST_RANKS} ranks" if many else ""
            yield Chart("memory", "Memory in use per rank", "GiB", memory, True, note)
    known = {key for key, *_ in KNOWN} | SHOWN_ELSEWHERE
    names = {n for run in runs for n in run.curves if n not in known and not n.startswith(ELAPSED)}
    for name in sorted(names)[:MOST_CHARTS]:
        if lines := _lines(runs, name, base):
            yield _chart(name, name, "", lines, False)


def _chart(key: str, title: str, unit: str, lines: list[Line], zero: bool) -> Chart:
    bad = sum(1 for line in lines for v in line.y if not math.isfinite(v) and v == v)
    return Chart(key, title, unit, lines, zero, "gaps: values that are not finite" if bad else "")


def _lines(runs: Sequence[Run], key: str, base: str) -> list[Line]:
    found = []
    for index, run in enumerate(runs):
        points = run.curves.get(key)
        if points is not None and any(map(math.isfinite, points.y)):
            found.append(_line(run, index, run.name, points, base))
    return found


def _memory_lines(runs: Sequence[Run], base: str) -> list[Line]:
    found = []
    for index, run in enumerate(runs):
        for rank, points in list(run.memory.items())[:MOST_RANKS]:
            found.append(
                _line(run, index, f"{run.name}, rank {rank}", points, base, faint=rank > 0)
            )
        measured = run.curves.get("memory_allocated_gib")
        if not run.memory and measured is not None:
            found.append(_line(run, index, run.name, measured, base))
    return found


def _line(run: Run, index: int, name: str, points: Points, base: str, faint: bool = False) -> Line:
    kept = thin(points.y)
    mean_x, mean_y = means(points.x, points.y)
    xs = [float(points.x[i]) for i in kept]
    if run.base != base and base in run.axes:
        xs = _on(run.axes[base], xs)
        mean_x = _on(run.axes[base], mean_x)
    return Line(index, name, xs, [points.y[i] for i in kept], faint, mean_x, mean_y)


def _on(axis: Points, xs: Iterable[float]) -> list[float]:
    """`xs` on another axis."""
    where = dict(zip(axis.x, axis.y, strict=True))
    return [where.get(int(x), math.nan) for x in xs]


def _axes(runs: Sequence[Run], base: str) -> list[tuple[str, str]]:
    """(axis, what it is called) of those that every run has."""
    names = {"step": "Steps", "samples": "Samples", "hours": "Time"}
    return [
        (a, text) for a, text in names.items() if a == base or all(a in run.axes for run in runs)
    ]


def _data(runs: Sequence[Run], charts: Sequence[Chart], base: str) -> dict[str, Any]:
    """What the script reads. An axis is a few places that it interpolates between."""
    axes = []
    for run in runs:
        own = {}
        for name, points in run.axes.items():
            if name != base:
                kept = thin(points.y, 100)
                xs = [float(points.x[i]) for i in kept]
                own[name] = [
                    _on(run.axes[base], xs) if run.base != base else xs,
                    [points.y[i] for i in kept],
                ]
        axes.append(own)
    rows = [
        {
            "key": c.key,
            "unit": c.unit,
            "zero": c.zero,
            "lines": [
                {"run": n.run, "name": n.name, "x": n.x, "y": n.y, "mx": n.mean_x, "my": n.mean_y}
                for n in c.lines
            ],
        }
        for c in charts
    ]
    return {"base": base, "axes": axes, "charts": rows}


def _json(value: Any) -> str:
    """JSON for a script block: six digits are enough for a picture, and nothing in it ends the
    block.
    """

    def short_of(item: Any) -> Any:
        if isinstance(item, Mapping):
            return {k: short_of(v) for k, v in item.items()}
        if isinstance(item, float):
            return (
                None
                if not math.isfinite(item)
                else int(item)
                if item == int(item) and abs(item) < 1e15
                else float(f"{item:.6g}")
            )
        return item if isinstance(item, (str, int, type(None))) else [short_of(v) for v in item]

    text = json.dumps(short_of(value), separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


# -- tables ----------------------------------------------------------------------------------------


def _phase_bars(runs: Sequence[Run]) -> dict[str, Any]:
    """Per run: (phase, milliseconds, percent of the longest bar)."""
    longest = max((sum(run.phases.values()) for run in runs), default=0.0)
    names = list(dict.fromkeys(phase for run in runs for phase in run.phases))
    rows = (
        [[(phase, ms, ms / longest * 100) for phase, ms in run.phases.items()] for run in runs]
        if longest > 0
        else []
    )
    return {
        "names": names,
        "rows": rows,
        "host": any(run.phases and run.phases_of_host for run in runs),
    }


def differences(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """(key, its value in each run) of all that differs between runs with a record.

    A value that is missing is "—".
    """
    known = [run for run in runs if run.facts]
    if len(known) < 2:
        return []
    rows = [dict(_facts_of(run)) for run in known]
    keys = sorted({key for row in rows for key in row if key != "run_record.folder"})
    table = [(key, [row.get(key, "—") for row in rows]) for key in keys]
    return [(key, values) for key, values in table if len(set(values)) > 1]


def _facts_of(run: Run) -> Iterator[tuple[str, str]]:
    yield from _flat(run.facts.get("config"), "")
    yield from _flat(run.facts.get("versions"), "version of ")
    for key in ("world_size", "device", "mesh", "precision", "parameters", "script"):
        if key in run.facts:
            yield f"({key.replace('_', ' ')})", _text(run.facts[key])


def _flat(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _flat(
                inner, f"{path}{key}" if not path or path.endswith(" ") else f"{path}.{key}"
            )
    elif path:
        yield path, _text(value)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


# -- words -----------------------------------------------------------------------------------------


def duration(seconds: float) -> str:
    """``1 h 05 min``; "" for NaN."""
    if not math.isfinite(seconds):
        return ""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24} d {hours % 24:02} h"
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {left:02} s"


def short(value: float) -> str:
    """A number with about four digits; "" for NaN."""
    if not math.isfinite(value):
        return "" if math.isnan(value) else "∞" if value > 0 else "-∞"
    if abs(value) >= 1e7:
        return f"{value / 1e9:.4g}G" if abs(value) >= 1e9 else f"{value / 1e6:.4g}M"
    if value == int(value):
        return f"{int(value):,}"
    if abs(value) >= 1e3:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def _gib(value: float) -> str:
    return f"{value:.2f} GiB" if math.isfinite(value) else ""


def _when(seconds: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
    except (ValueError, OverflowError, OSError):  # no time, or of no year that the system knows
        return ""
