"""What a search leaves in ``results_dir``: the best config, its command, a summary, a page with a
picture (torch-free).

Everything is made from rows, so a page can be written after each trial.
"""

from __future__ import annotations

import json
import os
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_autotuning.hiding import secret_paths, shown_config, texts_to_hide
from ds_autotuning.picture import picture
from ds_autotuning.search.why import UNITS, WORDS, Key, keys_of, number, shown, value_of
from ds_core.config.redaction import scrub

if TYPE_CHECKING:
    from ds_autotuning.config import Autotuning
    from ds_autotuning.records import Profile, Row

# -- files -----------------------------------------------------------------------------------------


def write_results(
    folder: Path,
    rows: Sequence[Row],
    best: Row | None,
    config: Mapping[str, Any],
    command: Sequence[str],
    section: Autotuning,
    profile: Profile | None = None,
) -> None:
    """Write ``summary.txt`` and ``index.html``, and of `best` ``ds_config_optimal.json`` and
    ``cmd_optimal.txt``.

    config: that of `best`, whole.
    command: that starts the script with it.

    Each file is whole or not there. Secrets of the config are in ``ds_config_optimal.json`` alone,
    which others then may not read; the summary names their keys.
    """
    folder.mkdir(parents=True, exist_ok=True)
    secrets = texts_to_hide(config)
    kept = secret_paths(config)
    if best is not None:
        _write(
            folder / "ds_config_optimal.json",
            json.dumps(config, indent=2) + "\n",
            0o600 if kept else 0o666,
        )
        _write(folder / "cmd_optimal.txt", scrub(shlex.join(command), secrets) + "\n")
    text = summary(rows, best, section)
    if best is not None and kept:
        text += f"\nds_config_optimal.json holds secrets, as the config did: {', '.join(kept)}\n"
    _write(folder / "summary.txt", scrub(text, secrets))
    _write(
        folder / "index.html",
        scrub(_page(rows, best, shown_config(config), command, section, profile), secrets),
    )


def _write(path: Path, text: str, mode: int = 0o666) -> None:
    part = path.with_name(f"{path.name}.part")
    part.unlink(missing_ok=True)
    with os.fdopen(
        os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w", encoding="utf-8"
    ) as file:
        file.write(text)
    os.replace(part, path)


def summary(rows: Sequence[Row], best: Row | None, section: Autotuning) -> str:
    """The search in plain text: the winner, why, and every trial, the best first."""
    lines = [_headline(rows, best, section), ""]
    if best is not None:
        lines += [f"  {key} = {shown(value)}" for key, value in best.setting.items()]
        keys = keys_of(rows, best, section.metric)
        lines += ["", "why:", *(f"  {line}" for line in map(_reason, keys))] if keys else []
    lines += [
        "",
        *_table(
            [
                _header(section.metric),
                *(_cells(row, section.metric) for row in _ranked(rows, section)),
            ]
        ),
    ]
    return "\n".join(lines) + "\n"


def _headline(rows: Sequence[Row], best: Row | None, section: Autotuning) -> str:
    counts = Counter(WORDS[row.result.status] for row in rows)
    tried = (
        f"{len(rows)} settings: " + ", ".join(f"{n} {word}" for word, n in counts.most_common())
        if rows
        else ""
    )
    if best is None:
        return f"no setting came to an end; {tried or 'none was tried'}"
    value = value_of(best, section.metric)
    return f"best: {best.name}, {number(value)} {UNITS[section.metric]}; {tried}"


def _reason(key: Key) -> str:
    others = []
    for other in sorted(key.others, key=lambda o: -(o.part or 0.0)):
        at = f"{100 * other.part:.0f} % of the best" if other.part is not None else other.note
        others.append(f"{other.value}: {at}")
    return f"{key.name} = {key.value} (instead of it, {'; '.join(others)})"


def _ranked(rows: Sequence[Row], section: Autotuning) -> list[Row]:
    sign = 1.0 if section.metric == "latency" else -1.0

    def order(row: Row) -> tuple[bool, float, int]:
        value = value_of(row, section.metric)
        return value is None, 0.0 if value is None else sign * value, row.number

    return sorted(rows, key=order)


def _header(metric: str) -> tuple[str, ...]:
    return "trial", UNITS[metric], "s per step", "device GiB", "forecast", "setting", "result"


def _cells(row: Row, metric: str) -> tuple[str, ...]:
    result = row.result
    forecast = "" if row.forecast is None else _gib(row.forecast.device)
    setting = ", ".join(
        f"{key.rpartition('.')[2]}={shown(value)}" for key, value in row.setting.items()
    )
    said = WORDS[result.status] + (f": {result.reason}" if result.reason else "")
    return (
        str(row.number or "-"),
        number(value_of(row, metric)),
        number(result.latency),
        _gib(result.peak_device),
        forecast,
        setting,
        said,
    )


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


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

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("ds_autotuning", "assets"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    facts = {}
    if profile is not None:
        facts = {"parameters": f"{profile.parameters:,}", "trained": f"{profile.trainable:,}"}
        facts |= {
            "ranks": str(profile.facts.get("world", "")),
            "device": str(profile.facts.get("device", "")),
        }
        if profile.activation_bytes_per_sample is not None:
            facts["activations of a sample"] = (
                f"{profile.activation_bytes_per_sample / 2**20:.3g} MiB"
            )
    return environment.get_template("results.html.j2").render(
        headline=_headline(rows, best, section),
        unit=UNITS[section.metric],
        picture=picture(rows, best, section.metric),
        keys=[] if best is None else keys_of(rows, best, section.metric),
        number=number,
        header=_header(section.metric),
        rows=[
            (row is best, row.result.status.value, _cells(row, section.metric))
            for row in _ranked(rows, section)
        ],
        config=json.dumps(config, indent=2) if best is not None else "",
        command=shlex.join(command) if best is not None else "",
        facts=facts,
    )
