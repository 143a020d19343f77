"""What a comparison found, as text and as data."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ds_verify.comparing import Difference, Report


def describe(report: Report) -> str:
    """The verdict in a few lines."""
    ranks = len({row.rank for row in report.rows})
    steps = len({row.step for row in report.rows})
    plural = "s" if ranks > 1 else ""
    of = f"{steps} step{'s' if steps > 1 else ''}"
    what = f"{len(report.rows)} tensors of {of} on {ranks} rank{plural}"
    first = report.first
    if first is None:
        text = f"equal: {what}, largest ratio {report.largest:.2g} of rounding"
        top = max(report.rows, key=lambda row: row.ratio)
        if top.ratio:
            text += f" ({_name(top)})"
        return "\n".join([text, *_skipped(report)])
    wrong = report.wrong
    ranks_of = sorted({r.rank for r in wrong if r.name == first.name and r.kind == first.kind})
    before = report.rows[: report.rows.index(first)]
    kinds: dict[str, int] = {}
    for row in before:
        if row.ratio <= report.limit:
            kinds[row.kind] = kinds.get(row.kind, 0) + 1
    equal = ", ".join(f"{count} {kind}" for kind, count in kinds.items()) or "nothing"
    lines = [
        f"different: {_name(first)}",
        f"  it differs by {first.relative:.2g} of its norm, {first.ratio:.3g} times what rounding "
        f"explains (limit {report.limit:g}); its norm is {first.norm:.4g}, the reference's "
        f"{first.reference:.4g}",
        f"  on ranks: {', '.join(map(str, ranks_of))} of {report.facts.get('world')}",
        f"  equal before it: {equal}",
        f"  what usually causes this: {report.cause}",
        f"  {len(wrong)} of {what} differ",
    ]
    return "\n".join([*lines, *_skipped(report)])


def _name(row: Difference) -> str:
    micro = f", micro-batch {row.micro}" if row.kind in MICRO else ""
    step = f"step {row.step}" if row.order[1] >= 0 else "before the first step"
    return f"{KIND_NAMES.get(row.kind, row.kind)} {row.name}, {step}{micro}, rank {row.rank}"


MICRO = ("forward", "backward", "local gradient")
KIND_NAMES = {
    "forward": "forward of",
    "backward": "backward, gradient of",
    "local gradient": "local gradient of",
    "gradient": "gradient of",
    "scale": "scale:",
    "norm": "norm:",
    "state": "state",
    "weight": "weight",
}


def _skipped(report: Report) -> list[str]:
    if not report.skipped:
        return []
    shown = ", ".join(report.skipped[:3])
    more = f" and {len(report.skipped) - 3} others" if len(report.skipped) > 3 else ""
    return [f"  not compared, since the layouts have them in different shapes: {shown}{more}"]


def as_data(report: Report) -> dict[str, object]:
    """The report as plain data; a ratio that is infinite is null."""

    def row(difference: Difference) -> dict[str, Any]:
        data = asdict(difference)
        return {
            k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in data.items()
        }

    first = report.first
    return {
        "equal": first is None,
        "limit": report.limit,
        "largest_ratio": report.largest if math.isfinite(report.largest) else None,
        "first": None if first is None else row(first),
        "cause": report.cause,
        "layout": dict(report.facts),
        "skipped": list(report.skipped),
        "tensors": [row(each) for each in report.rows],
    }
