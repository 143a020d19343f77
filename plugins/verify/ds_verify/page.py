"""The page of a verification: the verdict, and the ratios in the order of computation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from ds_plots.svg import Svg

from ds_verify.report import describe

if TYPE_CHECKING:
    from ds_verify.comparing import Difference, Report

COLOURS = {
    "forward": "#4477aa",
    "backward": "#66ccee",
    "local gradient": "#228833",
    "gradient": "#ccbb44",
    "scale": "#bbbbbb",
    "norm": "#000000",
    "state": "#aa3377",
    "weight": "#ee6677",
}
WIDTH = 960
HEIGHT = 260
LEFT = 60
LOW = -3.0  # log10 of the smallest ratio that is drawn as itself
MOST = 200  # rows in the table


def make_page(report: Report, script: str) -> str:
    """An HTML page without scripts or links."""
    pictures = "".join(
        f"<h2>Step {step}</h2>{_picture([r for r in report.rows if r.step == step], report.limit)}"
        for step in sorted({row.step for row in report.rows})
    )
    legend = " ".join(
        f'<span style="color:{colour}">&#9632;</span> {kind}' for kind, colour in COLOURS.items()
    )
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        f"<title>dscore verify {escape(script)}</title>"
        "<style>body{font-family:sans-serif;margin:2em}td,th{padding:2px 10px;text-align:left}"
        "</style></head><body>"
        f"<h1>dscore verify {escape(script)}</h1><pre>{escape(describe(report))}</pre>"
        "<p>Each mark is one tensor of one rank, in the order of computation. Its height is its "
        "difference from the reference over what rounding explains.</p>"
        f"<p>{legend}</p>{pictures}{_table(report)}</body></html>\n"
    )


def _picture(rows: Sequence[Difference], limit: float) -> str:
    """Ratios of one step on a logarithmic scale, with a line at the limit."""
    top = max(2.0, *(math.log10(r.ratio) for r in rows if 0 < r.ratio < math.inf), 0.0) + 0.3

    def height(ratio: float) -> float:
        power = top if ratio == math.inf else max(math.log10(ratio), LOW) if ratio > 0 else LOW
        return 15 + (top - power) / (top - LOW) * (HEIGHT - 40)

    svg = Svg(WIDTH, HEIGHT)
    for power in range(int(LOW), int(top) + 1):
        y = height(10.0**power)
        svg.polyline([(LEFT, y), (WIDTH, y)], stroke="#dddddd")
        svg.text(LEFT - 6, y + 4, f"1e{power}", text_anchor="end")
    svg.polyline([(LEFT, height(limit)), (WIDTH, height(limit))], stroke="#cc0000")
    svg.text(WIDTH - 4, height(limit) - 4, "limit", text_anchor="end", fill="#cc0000")
    places = {order: i for i, order in enumerate(sorted({row.order for row in rows}))}
    width = (WIDTH - LEFT - 8) / max(len(places), 1)
    for row in rows:
        x = LEFT + 4 + places[row.order] * width
        svg.rect(x, height(row.ratio) - 2, max(width, 2), 4, fill=COLOURS[row.kind])
    return str(svg)


def _table(report: Report) -> str:
    """The largest ratios."""
    chosen = sorted(report.rows, key=lambda row: -row.ratio)[:MOST]
    lines = "".join(
        f"<tr><td>{row.step}</td><td>{row.kind}</td><td>{escape(row.name)}</td><td>{row.micro}</td>"
        f"<td>{row.rank}</td><td>{row.ratio:.3g}</td><td>{row.relative:.3g}</td></tr>"
        for row in chosen
    )
    return (
        f"<h2>The {len(chosen)} largest ratios</h2><table><tr><th>step</th><th>kind</th>"
        "<th>tensor</th><th>micro-batch</th><th>rank</th><th>ratio</th><th>relative</th></tr>"
        f"{lines}</table>"
    )
