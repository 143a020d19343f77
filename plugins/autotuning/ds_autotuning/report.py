"""What a search leaves in ``results_dir``: the best config, its command, a summary, a page with a picture (torch-free).

Everything is made from rows, so a page can be written after each trial.
"""

from __future__ import annotations

import json
import math
import os
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_autotuning.records import Row, Status

if TYPE_CHECKING:
    from ds_autotuning.config import Autotuning
    from ds_autotuning.records import Profile

__all__ = ["Key", "Other", "best_of", "better", "keys_of", "write_results"]

UNITS = {"throughput": "samples/s", "latency": "s per step", "flops": "flops/s per device"}
WORDS = {
    Status.DONE: "done",
    Status.OUT_OF_MEMORY: "out of memory",
    Status.TIMEOUT: "took too long",
    Status.CRASHED: "crashed",
    Status.DOES_NOT_FIT: "does not fit, not run",
    Status.INVALID: "refused, not run",
}


@dataclass(frozen=True, slots=True)
class Other:
    """A value that the best setting does not have. metric: the best of the trials with it; None: none came so far.

    part: of the winner's; above 1 it would be better. note: what came of those trials.
    """

    value: str
    metric: float | None
    part: float | None
    note: str


@dataclass(frozen=True, slots=True)
class Key:
    """A key in which trials differ: its value in the best setting, and what others reach at their best."""

    name: str
    value: str
    others: tuple[Other, ...]

    @property
    def weight(self) -> float:
        """How much is lost with the best other value, as a part; what decides comes first."""
        parts = [other.part for other in self.others if other.part is not None]
        return 1.0 - max(parts) if parts else 1.0


def better(metric: str, one: float, other: float | None) -> bool:
    """Whether `one` is better: lower for latency, else higher; anything is better than nothing."""
    return other is None or (one < other if metric == "latency" else one > other)


def best_of(rows: Sequence[Row], metric: str) -> Row | None:
    """The best of those that came to an end; of equals the first."""
    best: Row | None = None
    for row in rows:
        value = _value(row, metric)
        if value is not None and better(metric, value, None if best is None else best.result.metric(metric)):
            best = row
    return best


def _value(row: Row, metric: str) -> float | None:
    value = row.result.metric(metric) if row.result.status is Status.DONE else None
    return value if value is not None and math.isfinite(value) else None


def keys_of(rows: Sequence[Row], best: Row, metric: str) -> list[Key]:
    """Why `best` won: for every key in which trials differ, what the best trials with its other values reached."""
    mine = _value(best, metric)
    assert mine is not None
    found = []
    for name in dict.fromkeys(key for row in rows for key in row.setting):
        by_value: dict[str, list[Row]] = {}
        for row in rows:
            by_value.setdefault(_shown(row.setting.get(name)), []).append(row)
        chosen = _shown(best.setting.get(name))
        others = []
        for value, tried in by_value.items():
            if value == chosen:
                continue
            winner = best_of(tried, metric)
            reached = None if winner is None else _value(winner, metric)
            counts = Counter(WORDS[row.result.status] for row in tried)
            note = ", ".join(f"{count} {word}" for word, count in counts.most_common())
            others.append(Other(value, reached, None if reached is None else _part(metric, reached, mine), note))
        if others:
            found.append(Key(name, chosen, tuple(others)))
    return sorted(found, key=lambda key: -key.weight)


def _part(metric: str, reached: float, best: float) -> float:
    one, other = (best, reached) if metric == "latency" else (reached, best)
    return one / other if other else 0.0


def _shown(value: Any) -> str:
    if isinstance(value, str):
        return value
    return "default" if value is None else json.dumps(value)


# -- files -----------------------------------------------------------------------------------------------------------


def write_results(
    folder: Path,
    rows: Sequence[Row],
    best: Row | None,
    config: Mapping[str, Any],
    command: Sequence[str],
    section: Autotuning,
    profile: Profile | None = None,
) -> None:
    """Write ``summary.txt`` and ``index.html``, and of `best` ``ds_config_optimal.json`` and ``cmd_optimal.txt``.

    config: that of `best`, whole. command: that starts the script with it. Each file is whole or not there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if best is not None:
        _write(folder / "ds_config_optimal.json", json.dumps(config, indent=2) + "\n")
        _write(folder / "cmd_optimal.txt", shlex.join(command) + "\n")
    _write(folder / "summary.txt", summary(rows, best, section))
    _write(folder / "index.html", _page(rows, best, config, command, section, profile))


def _write(path: Path, text: str) -> None:
    part = path.with_name(f"{path.name}.part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)


def summary(rows: Sequence[Row], best: Row | None, section: Autotuning) -> str:
    """The search in plain text: the winner, why, and every trial, the best first."""
    lines = [_headline(rows, best, section), ""]
    if best is not None:
        lines += [f"  {key} = {_shown(value)}" for key, value in best.setting.items()]
        keys = keys_of(rows, best, section.metric)
        lines += ["", "why:", *(f"  {line}" for line in map(_reason, keys))] if keys else []
    lines += ["", *_table([_header(section.metric), *(_cells(row, section.metric) for row in _ranked(rows, section))])]
    return "\n".join(lines) + "\n"


def _headline(rows: Sequence[Row], best: Row | None, section: Autotuning) -> str:
    counts = Counter(WORDS[row.result.status] for row in rows)
    tried = f"{len(rows)} settings: " + ", ".join(f"{n} {word}" for word, n in counts.most_common()) if rows else ""
    if best is None:
        return f"no setting came to an end; {tried or 'none was tried'}"
    value = _value(best, section.metric)
    return f"best: {best.name}, {number(value)} {UNITS[section.metric]}; {tried}"


def _reason(key: Key) -> str:
    told = []
    for other in sorted(key.others, key=lambda o: -(o.part or 0.0)):
        at = f"{100 * other.part:.0f} % of the best" if other.part is not None else other.note
        told.append(f"{other.value}: {at}")
    return f"{key.name} = {key.value} (instead of it, {'; '.join(told)})"


def _ranked(rows: Sequence[Row], section: Autotuning) -> list[Row]:
    sign = 1.0 if section.metric == "latency" else -1.0

    def order(row: Row) -> tuple[bool, float, int]:
        value = _value(row, section.metric)
        return value is None, 0.0 if value is None else sign * value, row.number

    return sorted(rows, key=order)


def _header(metric: str) -> tuple[str, ...]:
    return "trial", UNITS[metric], "s per step", "device GiB", "forecast", "setting", "result"


def _cells(row: Row, metric: str) -> tuple[str, ...]:
    result = row.result
    told = "" if row.forecast is None else _gib(row.forecast.device)
    setting = ", ".join(f"{key.rpartition('.')[2]}={_shown(value)}" for key, value in row.setting.items())
    said = WORDS[result.status] + (f": {result.reason}" if result.reason else "")
    return (
        str(row.number),
        number(_value(row, metric)),
        number(result.latency),
        _gib(result.peak_device),
        told,
        setting,
        said,
    )


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def number(value: float | None) -> str:
    """With about four digits; "" for None."""
    if value is None:
        return ""
    return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}" if abs(value) < 1e7 else f"{value:.3e}"


def _gib(size: float | None) -> str:
    return "" if size is None else f"{size / 2**30:.3g}"


def _page(
    rows: Sequence[Row],
    best: Row | None,
    config: Mapping[str, Any],
    command: Sequence[str],
    section: Autotuning,
    profile: Profile | None,
) -> str:
    import jinja2

    from ds_autotuning.picture import picture

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("ds_autotuning", "assets"), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    facts = {}
    if profile is not None:
        facts = {"parameters": f"{profile.parameters:,}", "trained": f"{profile.trainable:,}"}
        facts |= {"ranks": str(profile.facts.get("world", "")), "device": str(profile.facts.get("device", ""))}
        if profile.activation_bytes_per_sample is not None:
            facts["activations of a sample"] = f"{profile.activation_bytes_per_sample / 2**20:.3g} MiB"
    return environment.get_template("results.html.j2").render(
        headline=_headline(rows, best, section),
        unit=UNITS[section.metric],
        picture=picture(rows, best, section.metric),
        keys=[] if best is None else keys_of(rows, best, section.metric),
        number=number,
        header=_header(section.metric),
        rows=[(row is best, row.result.status.value, _cells(row, section.metric)) for row in _ranked(rows, section)],
        config=json.dumps(config, indent=2) if best is not None else "",
        command=shlex.join(command) if best is not None else "",
        facts=facts,
    )
