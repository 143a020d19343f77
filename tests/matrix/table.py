"""docs/combinations.md, and the verdicts that it is made of: results.json and refused.json."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ds_testing.kits.matrix.covering import Combination, Rules, combinations, held
from features import FEATURES, NAMES, possible

HERE = Path(__file__).parent
REFUSED = HERE / "refused.json"
RESULTS = HERE / "results.json"
GOOD = ("exact", "documented")
"""The kinds of results of rows that are right."""
PAGE = HERE.parent.parent / "docs" / "combinations.md"

HEAD = """# Combinations

What features do together. `make test-matrix` trains a small decoder in rows that hold every pair of
the values below, and every triple of those of its numeric core (stage, tp, sp, ep, pp, optimizer,
precision, clipping, accumulation, freezing), and compares losses and all weights with plain torch in
fp64 in one process; in less than fp64 with what the engine in one process is off by itself. This page
is generated from its results: `python tests/matrix/matrix.py --write`.

- **exact**: equal to rounding (1e-9 of the way that weights went, in fp64).
- **as documented**: the feature changes numbers by design; how far they may be off is in the table.
- **refused**: a message at the start names both keys. Nothing trains.

"""


def read(path: Path) -> list[dict[str, Any]]:
    """The entries of one of the two files; none where it is not there."""
    if not path.exists():
        return []
    entries: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return entries


def pair_of(entry: Mapping[str, Any]) -> Combination:
    """The pair of an entry of refused.json."""
    return frozenset((name, value) for name, value in entry["pair"])


def keep(results: Iterable[Mapping[str, Any]]) -> None:
    """Add the results of runs to the two files."""
    rows = {json.dumps(entry["row"]): entry for entry in read(RESULTS)}
    refused = []
    for result in results:
        if result["kind"] in GOOD:
            fields = ("row", "kind", "off", "allowed")
            rows[json.dumps(result["row"])] = {name: result[name] for name in fields}
        elif result["kind"] == "refused" and len(result["pair"]) == 2:
            entry = {
                "pair": result["pair"],
                "names both": result["both"],
                "message": result["message"].partition(" raised ")[2] or result["message"],
                "by": "initialize",
            }
            refused.append(entry)
    _write(RESULTS, rows.values())
    keep_refused(refused)


def keep_refused(entries: Iterable[Mapping[str, Any]]) -> None:
    """Add entries to refused.json, of pairs that it does not have."""
    known: dict[Combination, Mapping[str, Any]] = {pair_of(e): e for e in read(REFUSED)}
    for entry in entries:
        known.setdefault(pair_of(entry), entry)
    _write(REFUSED, sorted(known.values(), key=lambda entry: sorted(pair_of(entry))))


def _write(path: Path, entries: Iterable[Mapping[str, Any]]) -> None:
    lines = ",\n".join(json.dumps(entry) for entry in entries)
    path.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def without_verdict() -> set[Combination]:
    """Pairs that are neither refused, nor in a row that ran; of those that a row can hold."""
    refused = [pair_of(entry) for entry in read(REFUSED)]
    rules = Rules(NAMES, refused, possible)
    had = {pair for entry in read(RESULTS) for pair in held(entry["row"], 2)}
    left = combinations(NAMES, 2) - had - set(refused)
    return {pair for pair in left if rules.complete(dict(pair)) is not None}


def page() -> str:
    """The text of docs/combinations.md."""
    rows = read(RESULTS)
    refused = read(REFUSED)
    parts = [HEAD, f"{len(rows)} rows have run; {len(refused)} pairs are refused.\n"]
    parts.append("\n## Features\n\n| feature | values |\n| --- | --- |\n")
    parts += [f"| {name} | {', '.join(values)} |\n" for name, values in NAMES.items()]
    parts.append(
        "\n## As documented\n\n| value | weights may be off by | why |\n| --- | --- | --- |\n"
    )
    for name, values in FEATURES.items():
        for value, found in values.items():
            if most := found.within or found.unsteady:
                parts.append(f"| {name}: {value} | {most:g} of their way | {found.note} |\n")
    others = [
        f"{name}: {value}"
        for name, values in FEATURES.items()
        for value, found in values.items()
        if found.with_engine
    ]
    parts.append(f"\nCompared with the engine in one process: {', '.join(others)}.\n")
    parts.append("\n## Refused\n\n| pair | message |\n| --- | --- |\n")
    for entry in refused:
        pair = ", ".join(f"{name}: {value}" for name, value in entry["pair"])
        parts.append(f"| {pair} | {_short(entry['message'])} |\n")
    return "".join(parts)


def _short(message: str) -> str:
    """One line, without the error's class and the config's origin, for a cell of a table."""
    text = " ".join(message.split()).replace("|", "\\|")
    return text.partition("Error: ")[2].removeprefix("config dict: ") or text


def write(results: Sequence[Mapping[str, Any]]) -> None:
    """Keep `results`, and write the page anew."""
    keep(results)
    PAGE.write_text(page(), encoding="utf-8")
