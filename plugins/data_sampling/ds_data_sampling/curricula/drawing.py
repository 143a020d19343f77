"""Curricula before anything runs: difficulties over steps, and the share of samples that they admit
(torch-free).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ds_plots.svg import Svg

from ds_core.errors import UsageError
from ds_data_sampling.config import DataEfficiency
from ds_data_sampling.curricula.config import LegacyCurriculum, Metric
from ds_data_sampling.curricula.schedules import difficulty_at

if TYPE_CHECKING:
    from ds_core.config import RunConfig
    from ds_core.entries import Chart
    from ds_data_sampling.curricula.config import Schedule
    from ds_data_sampling.curricula.index import MetricIndex

COLUMNS = 11
POINTS = 480
LEFT = 60
TOP = 30
PANEL = 120
GAP = 46


@dataclass(frozen=True)
class Curve:
    """A metric's schedule over steps."""

    name: str
    title: str
    # The steps that are shown, from 1.
    steps: list[int]
    # The difficulty at each of `steps`; empty for a custom schedule.
    difficulties: list[int]
    # The share of samples that are admitted, 0 to 1; empty where the analysis has no files to read.
    shares: list[float]
    # Why there are no shares, or no curve.
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
    """A curve for each schedule, over `steps` steps; None: until the slowest has ended."""
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
    svg = Svg(LEFT + POINTS + 70, TOP + (PANEL + GAP) * len(curves))
    for number, curve in enumerate(curves):
        _draw(curve, svg, TOP + (PANEL + GAP) * number)
    return str(svg)


def _draw(curve: Curve, svg: Svg, top: int) -> None:
    """One panel.

    top: its upper edge, in pixels.
    """
    bottom = top + PANEL
    right = LEFT + POINTS
    svg.text(LEFT, top - 8, curve.title, font_size=14)
    svg.rect(LEFT, top, POINTS, PANEL, fill="#f7f7f7", stroke="#999999")
    # The share of samples is drawn below, so that the line of the difficulty stays readable.
    if curve.shares:
        area = [(LEFT, bottom), *_stairs(curve.steps, curve.shares, bottom), (right, bottom)]
        svg.polygon(area, fill="#4477aa", fill_opacity=0.25)
        svg.text(right + 6, top + 10, "100 %", text_anchor="start", fill="#4477aa")
        svg.text(right + 6, bottom, "0 %", text_anchor="start", fill="#4477aa")
    if curve.difficulties:
        high = max(*curve.difficulties, 1)
        scaled = [value / high for value in curve.difficulties]
        line = _stairs(curve.steps, scaled, bottom)
        svg.polyline(line, stroke="#cc3311", stroke_width=2)
        svg.text(LEFT - 6, top + 10, str(high), text_anchor="end", fill="#cc3311")
        svg.text(LEFT - 6, bottom, "0", text_anchor="end", fill="#cc3311")
    svg.text(LEFT, bottom + 16, "step 1")
    note = "" if curve.shares else curve.note
    svg.text(LEFT + POINTS / 2, bottom + 16, note, text_anchor="middle")
    svg.text(right, bottom + 16, str(curve.steps[-1]), text_anchor="end")


def _stairs(steps: list[int], values: list[float], bottom: int) -> Iterator[tuple[float, float]]:
    """The points of `values`, 0 to 1: each holds from its step on, so the line has corners."""
    last = max(steps[-1], 2)
    before = values[0]
    for step, value in zip(steps, values, strict=True):
        x = LEFT + (step - 1) / (last - 1) * POINTS
        yield x, bottom - before * PANEL
        yield x, bottom - value * PANEL
        before = value
