"""Curricula before anything runs: difficulties over steps, and the share of samples that they admit
(torch-free).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ds_core.errors import UsageError
from ds_data_sampling.config import DataEfficiency, LegacyCurriculum, Metric
from ds_data_sampling.curricula.schedules import difficulty_at

if TYPE_CHECKING:
    from ds_core.config import RunConfig
    from ds_core.entries import Chart
    from ds_data_sampling.config import Schedule
    from ds_data_sampling.curricula.index import MetricIndex

COLUMNS = 11
POINTS = 480
LEFT = 60
TOP = 30
PANEL = 120
GAP = 46


@dataclass(frozen=True)
class Curve:
    """A metric's schedule over steps.

    steps: those that are shown, from 1. difficulties: at these steps; empty for a custom schedule.
    shares: of samples that are admitted, 0 to 1, where the files of the analysis can be read. note:
    why there are none, or no curve.
    """

    name: str
    title: str
    steps: list[int]
    difficulties: list[int]
    shares: list[float]
    note: str = ""


def charts(section: DataEfficiency | LegacyCurriculum) -> list[Chart]:
    """What ``dscore plan`` shows of a section."""
    from ds_core.entries import Chart

    name = "curriculum_learning" if isinstance(section, LegacyCurriculum) else "data_efficiency"
    schedules = _schedules(section)
    if not schedules:
        return []
    curves = curves_of(schedules)
    return [Chart(name, f"curriculum of {name}", as_text(curves), as_svg(curves))]


def schedules_of(config: RunConfig) -> dict[str, Schedule]:
    """The schedules of a run, by metric; that of the section curriculum_learning has the section's
    name.
    """
    found: dict[str, Schedule] = {}
    for section in (config.section(DataEfficiency), config.section(LegacyCurriculum)):
        if section is not None:
            found |= _schedules(section)
    return found


def _schedules(section: DataEfficiency | LegacyCurriculum) -> Mapping[str, Schedule]:
    if isinstance(section, LegacyCurriculum):
        return {"curriculum_learning": section} if section.enabled else {}
    return section.curriculum.curriculum_metrics if section.curriculum is not None else {}


def curves_of(schedules: Mapping[str, Schedule], steps: int | None = None) -> list[Curve]:
    """A curve for each schedule, over `steps` steps; None: until the slowest has come to its
    end."""
    until = steps or max((_last_step(schedule) for schedule in schedules.values()), default=1)
    count = min(until, POINTS)
    shown = sorted({1 + (until - 1) * i // max(count - 1, 1) for i in range(count)})
    return [_curve(name, schedule, shown) for name, schedule in schedules.items()]


def _last_step(schedule: Schedule) -> int:
    numbers = schedule.schedule_config
    if schedule.schedule_type == "custom":
        return 1
    last = numbers.max_step[-1] if numbers.max_step else numbers.total_curriculum_step
    return (last or 1) + 1


def _curve(name: str, schedule: Schedule, steps: list[int]) -> Curve:
    low = schedule.min_difficulty
    high = schedule.max_difficulty
    kind = schedule.schedule_type
    title = f"{name}: {kind}, {low} to {high}"
    if isinstance(schedule, Metric) and schedule.difficulty_type == "percentile":
        title += " % of the samples"
    if kind == "custom":
        return Curve(name, title, steps, [], [], "a function that the program gives")
    found = [difficulty_at(schedule, step) for step in steps]
    if not isinstance(schedule, Metric):
        return Curve(name, title, steps, found, [], "length of sequences")
    if schedule.clustering_type != "schedule_based":
        return Curve(name, title, steps, found, [], "all samples come at any time")
    try:
        index = _index(schedule)
    except UsageError as error:
        return Curve(name, title, steps, found, [], str(error))
    admits = index.up_to_value if schedule.difficulty_type == "value" else index.up_to_percentile
    size = max(len(index.samples), 1)
    return Curve(name, title, steps, found, [admits(difficulty) / size for difficulty in found])


def _index(metric: Metric) -> MetricIndex:
    from ds_data_sampling.curricula.index import read_index

    assert metric.index_to_sample_path is not None
    values = metric.index_to_metric_path if metric.difficulty_type == "value" else None
    return read_index(metric.index_to_sample_path, values)


def as_text(curves: list[Curve]) -> str:
    """A small table for each curve."""
    return "\n\n".join("\n".join(_table(curve)) for curve in curves)


def _table(curve: Curve) -> Iterator[str]:
    yield curve.title
    if curve.difficulties:
        last = len(curve.steps) - 1
        places = sorted({last * i // (COLUMNS - 1) for i in range(COLUMNS)})
        rows = {"step": [str(curve.steps[i]) for i in places]}
        rows["difficulty"] = [str(curve.difficulties[i]) for i in places]
        if curve.shares:
            rows["samples"] = [f"{curve.shares[i]:.1%}" for i in places]
        width = max(len(text) for row in rows.values() for text in row)
        for name, row in rows.items():
            yield f"  {name:<10} " + " ".join(text.rjust(width) for text in row)
    if curve.note:
        yield f"  {curve.note}"


def as_svg(curves: list[Curve]) -> str:
    """A complete SVG document: a panel for each curve, difficulties as a line over the share of
    samples.
    """
    width = LEFT + POINTS + 70
    height = TOP + (PANEL + GAP) * len(curves)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        'font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for number, curve in enumerate(curves):
        parts += _panel(curve, TOP + (PANEL + GAP) * number)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(curve: Curve, top: int) -> Iterator[str]:
    bottom = top + PANEL
    last = max(curve.steps[-1], 2)
    right = LEFT + POINTS
    yield f'<text x="{LEFT}" y="{top - 8}" font-size="14">{_escaped(curve.title)}</text>'
    yield (
        f'<rect x="{LEFT}" y="{top}" width="{POINTS}" height="{PANEL}" fill="#f7f7f7" '
        'stroke="#999999"/>'
    )

    def line(values: list[float]) -> str:
        points = []
        before = values[0]
        for step, value in zip(curve.steps, values, strict=True):
            x = LEFT + (step - 1) / (last - 1) * POINTS
            points += [
                f"{x:.1f},{bottom - before * PANEL:.1f}",
                f"{x:.1f},{bottom - value * PANEL:.1f}",
            ]
            before = value
        return " ".join(points)

    if curve.shares:
        area = f"{LEFT},{bottom} {line(curve.shares)} {right},{bottom}"
        yield f'<polygon points="{area}" fill="#4477aa" fill-opacity="0.25"/>'
        yield from _ticks(right + 6, "start", [(top + 10, "100 %"), (bottom, "0 %")], "#4477aa")
    if curve.difficulties:
        high = max(*curve.difficulties, 1)
        scaled = [value / high for value in curve.difficulties]
        yield f'<polyline points="{line(scaled)}" fill="none" stroke="#cc3311" stroke-width="2"/>'
        yield from _ticks(LEFT - 6, "end", [(top + 10, str(high)), (bottom, "0")], "#cc3311")
    foot = "" if curve.shares else _escaped(curve.note)
    yield f'<text x="{LEFT}" y="{bottom + 16}">step 1</text>'
    yield f'<text x="{LEFT + POINTS / 2}" y="{bottom + 16}" text-anchor="middle">{foot}</text>'
    yield f'<text x="{right}" y="{bottom + 16}" text-anchor="end">{curve.steps[-1]}</text>'


def _ticks(x: float, anchor: str, rows: list[tuple[int, str]], colour: str) -> Iterator[str]:
    for y, text in rows:
        yield f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="{colour}">{text}</text>'


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
