"""Timelines of schedules, as text and as SVG (torch-free)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

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
            "they "
            "are drawn here"
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
        f"makespan {proof.makespan:g} forwards, bubble {100 * proof.bubble:.1f} %, speed-up "
        f"{proof.speedup:.2f} of "
        f"{len(proof.spans)}, micro-batches kept per stage: {kept}"
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
    scale = 9 * max(len(_label(s)) for s in spans) / unit
    width = LEFT + proof.makespan * scale + 10
    height = TOP + ROW * (len(proof.spans) + 2)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
        'font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{width:g}" height="{height:g}" fill="white"/>',
        f'<text x="8" y="19" font-size="14">{_escaped(title)}</text>',
        *_rows(proof, begin, scale),
        *_legend(spans, TOP + ROW * len(proof.spans) + 18),
        '<text x="8" '
        f'y="{TOP + ROW * (len(proof.spans) + 1) + 14:g}">{_escaped(facts(proof))}</text>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _rows(proof: ScheduleProof, begin: float, scale: float) -> Iterator[str]:
    for stage, row in enumerate(proof.spans):
        y = TOP + ROW * stage
        yield f'<text x="8" y="{y + 17}">stage {stage}</text>'
        yield (
            f'<rect x="{LEFT}" y="{y}" width="{proof.makespan * scale:g}" height="{ROW - 4}" '
            'fill="#eeeeee"/>'
        )
        for span in row:
            x = LEFT + (span.start - begin) * scale
            width = (span.stop - span.start) * scale
            shade = 1 - 0.35 * (span.chunk % 3)
            yield (
                f'<rect x="{x:g}" y="{y}" width="{width:g}" height="{ROW - 4}" '
                f'fill="{COLOURS[span.kind]}" '
                f'fill-opacity="{shade:g}" stroke="#555555" stroke-width="0.5"/>'
            )
            yield (
                f'<text x="{x + width / 2:g}" y="{y + 15}" text-anchor="middle" '
                f'font-size="11">{span.micro}</text>'
            )


def _legend(spans: list[Busy], y: int) -> Iterator[str]:
    x = 8
    for kind, meaning in MEANING.items():
        if any(s.kind == kind for s in spans):
            yield (
                f'<rect x="{x}" y="{y - 10}" width="12" height="12" fill="{COLOURS[kind]}" '
                'stroke="#555555"/>'
            )
            yield f'<text x="{x + 17}" y="{y}">{meaning}</text>'
            x += 40 + 7 * len(meaning)


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
