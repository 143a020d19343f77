"""Timelines of schedules, as text and as SVG (torch-free)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ds_plots.svg import Svg

from ds_core.entries import Chart
from ds_core.errors import UsageError
from ds_pipeline.config import PipelineConfig
from ds_pipeline.schedules.choose import find_schedule, make_schedule
from ds_pipeline.schedules.validate import Busy, ScheduleError, ScheduleProof, check

if TYPE_CHECKING:
    from ds_core.config import RunConfig
    from ds_core.plugins import Plugins

COLOURS = {"F": "#7fb3e6", "B": "#86c98a", "I": "#a5dba8", "W": "#f0c36d"}
MEANING = {
    "F": "forward",
    "B": "backward",
    "I": "backward, inputs' half",
    "W": "backward, weights' half",
}
ROW = 26
LEFT = 64
TOP = 30


def timeline(config: RunConfig, plugins: Plugins) -> list[Chart]:
    """What ``dscore plan`` shows: the schedule of the section ``pipeline``, where it has a number
    of stages.
    """
    section = config.section(PipelineConfig)
    if section is None:
        return []
    stages = section.stages
    chunks = section.chunks
    gas = config.core.gradient_accumulation_steps
    count = gas if isinstance(gas, int) else 1
    if not isinstance(stages, int):
        hint = (
            'the PipelineModule decides the number of stages; with "stages" in the config, '
            "they are drawn here"
        )
        return [Chart("pipeline", "pipeline", hint)]
    try:
        make = find_schedule(section.schedule, plugins)
        proof = check(
            lambda stage: make_schedule(section.schedule, count, stages, stage, chunks, make=make)
        )
    except ScheduleError as error:
        raise UsageError(f"pipeline.schedule: {section.schedule} is wrong: {error}") from None
    title = titled(section.schedule, stages, chunks, count)
    return [Chart("pipeline", f"pipeline, {title}", as_text(proof), as_svg(proof, title))]


def titled(schedule: str, stages: int, chunks: int, count: int) -> str:
    """One line for a drawing."""
    parts = f", {chunks} chunks" if chunks > 1 else ""
    return f"{schedule}: {stages} stages{parts}, {count} micro-batches"


def facts(proof: ScheduleProof) -> str:
    """The figures in one line."""
    kept = ", ".join(map(str, proof.activations))
    return (
        f"makespan {proof.makespan:g} forwards, bubble {100 * proof.bubble:.1f} %, "
        f"speed-up {proof.speedup:.2f} of {len(proof.spans)}, "
        f"micro-batches kept per stage: {kept}"
    )


def _label(span: Busy) -> str:
    return f"{span.kind}{span.micro}" + ("'" * span.chunk)


def as_text(proof: ScheduleProof) -> str:
    """One line per stage; a letter for the kind, the micro-batch, a prime per chunk after the
    first.

    The shortest piece of work is as wide as the longest label; dots are idle.
    """
    spans = [s for row in proof.spans for s in row]
    begin = min(s.start for s in spans)
    unit = min(s.stop - s.start for s in spans)
    scale = (max(len(_label(s)) for s in spans) + 1) / unit
    lines = []
    for stage, row in enumerate(proof.spans):
        line = ""
        for span in row:
            start = round((span.start - begin) * scale)
            stop = round((span.stop - begin) * scale)
            line = line.ljust(start, ".") + _label(span).ljust(stop - start - 1, "-") + " "
        lines.append(f"stage {stage:<2} {line.ljust(round(proof.makespan * scale), '.')}")
    kinds = ", ".join(f"{k} {MEANING[k]}" for k in MEANING if any(s.kind == k for s in spans))
    return "\n".join([*lines, "", f"{kinds}; . idle", facts(proof)])


def as_svg(proof: ScheduleProof, title: str) -> str:
    """A complete SVG document."""
    spans = [s for row in proof.spans for s in row]
    begin = min(s.start for s in spans)
    unit = min(s.stop - s.start for s in spans)
    # The shortest piece of work is as wide as the longest label.
    scale = 9 * max(len(_label(s)) for s in spans) / unit
    below = TOP + ROW * len(proof.spans)
    svg = Svg(LEFT + proof.makespan * scale + 10, below + 2 * ROW)
    svg.text(8, 19, title, font_size=14)
    for stage, row in enumerate(proof.spans):
        _draw_stage(svg, stage, row, proof.makespan, begin, scale)
    _draw_legend(svg, spans, below + 18)
    svg.text(8, below + ROW + 14, facts(proof))
    return str(svg)


def _draw_stage(
    svg: Svg, stage: int, row: Sequence[Busy], makespan: float, begin: float, scale: float
) -> None:
    y = TOP + ROW * stage
    svg.text(8, y + 17, f"stage {stage}")
    svg.rect(LEFT, y, makespan * scale, ROW - 4, fill="#eeeeee")
    for span in row:
        x = LEFT + (span.start - begin) * scale
        width = (span.stop - span.start) * scale
        # Chunks of one stage differ in shade, kinds of work in colour.
        shade = 1 - 0.35 * (span.chunk % 3)
        svg.rect(
            x,
            y,
            width,
            ROW - 4,
            fill=COLOURS[span.kind],
            fill_opacity=shade,
            stroke="#555555",
            stroke_width=0.5,
        )
        svg.text(x + width / 2, y + 15, str(span.micro), text_anchor="middle", font_size=11)


def _draw_legend(svg: Svg, spans: list[Busy], y: int) -> None:
    x = 8
    for kind, meaning in MEANING.items():
        if any(s.kind == kind for s in spans):
            svg.rect(x, y - 10, 12, 12, fill=COLOURS[kind], stroke="#555555")
            svg.text(x + 17, y, meaning)
            # About 7 pixels a letter.
            x += 40 + 7 * len(meaning)
