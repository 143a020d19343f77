"""The table of DeepSpeed's config keys: what becomes of each, from the models of the config and
from the differences.

States come from the models themselves, as a run sees them; for what is no key, and for what behaves
differently, the rows of docs/differences.md are looked up.
"""

from __future__ import annotations

import enum
import inspect
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_core.catalogue import known, offered_by
from ds_core.config import CoreConfig
from ds_core.config.keys import Key, iter_keys
from ds_core.config.section import NOT_OFFERED, WITHOUT_EFFECT, marks
from ds_core.entries import resolve
from ds_core.plugins import Plugins

ROOT = Path(__file__).parents[2]
REFERENCE: dict[str, list[str]] = json.loads(
    (ROOT / "tests" / "config" / "reference_keys.json").read_text()
)
"""The documented keys by section ("": the top level), at any depth."""


class State(enum.Enum):
    """What becomes of a key."""

    WORKS = "works"
    DIFFERS = "works differently"
    WITHOUT_EFFECT = "without effect, with a note"
    NOT_OFFERED = "not offered, with an error"


@dataclass(frozen=True)
class Row:
    """One key. documented: what a row of differences is about; here: how it differs, or what to use
    instead.
    """

    name: str
    state: State
    documented: str = ""
    here: str = ""


@dataclass(frozen=True)
class Departure:
    """A row of docs/differences.md. words: those in code of what is documented."""

    words: frozenset[str]
    documented: str
    here: str
    refused: bool


def departures() -> list[Departure]:
    """The rows of docs/differences.md."""
    found = []
    refused = False
    for line in (ROOT / "docs" / "differences.md").read_text().splitlines():
        if line.startswith("## "):
            refused = line == "## Not offered"
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if not line.startswith("| ") or len(cells) != 3:
            continue
        codes = re.findall(r"`([^`]+)`", cells[0])
        words = frozenset(word for code in codes for word in re.findall(r"\w+", code))
        found.append(Departure(words, cells[0], cells[1], refused))
    return found


def keys_of(section: str) -> list[Key]:
    """The keys of `section`, which a plugin owns or the core."""
    if section and offered_by("sections", section):
        model, _ = Plugins().models([section])[section]
        return list(iter_keys(model))
    return [
        key
        for key in iter_keys(CoreConfig)
        if key.path.startswith(f"{section}." if section else "")
    ]


def parameters_of_optimizers() -> set[str]:
    """What optimizers take as parameters, any of them."""

    def one(entry: Any) -> set[str]:
        if entry.params is not None:
            return {key.spelling for key in iter_keys(resolve(entry.params))}
        return set(inspect.signature(resolve(entry.load)).parameters)

    entries = [
        entry for answer in Plugins().offers("ds_optimizers") for entry in answer.value.values()
    ]
    return set().union(*map(one, entries))


def rows_of(section: str, names: list[str], known_departures: list[Departure]) -> Iterator[Row]:
    """What becomes of each of the documented `names` of `section`."""
    if section == "optimizer.params":
        taken = parameters_of_optimizers()
        for name in names:
            yield Row(name, State.WORKS if name in taken else State.NOT_OFFERED)
        return
    there = keys_of(section)
    for name in names:
        if not section and name in known("sections") and offered_by("sections", name):
            yield Row(name, State.WORKS)
            continue
        told = next(
            (d for d in known_departures if name in d.words and _meant(d, section, name)), None
        )
        fields = [marks(key.field) for key in there if key.spelling == name]
        yield _row(name, fields, told)


def _meant(departure: Departure, section: str, name: str) -> bool:
    """Whether a row is about this key: common names (`enabled`, `type`) need their section beside
    them.
    """
    common = sum(name in names for names in REFERENCE.values()) > 1
    return not common or (bool(section) and section in departure.words)


def _row(name: str, fields: list[Mapping[str, Any]], told: Departure | None) -> Row:
    for mark, state in ((NOT_OFFERED, State.NOT_OFFERED), (WITHOUT_EFFECT, State.WITHOUT_EFFECT)):
        if fields and all(mark in field for field in fields):
            return Row(name, state, here=str(fields[0][mark]))
    if told is None:
        return Row(name, State.WORKS if fields else State.NOT_OFFERED)
    return Row(name, State.DIFFERS if fields else State.NOT_OFFERED, told.documented, told.here)


def owner_of(section: str) -> str:
    """The distribution that serves `section`; empty for one that nobody does."""
    if section in ("", "optimizer", "optimizer.params", "scheduler") or not offered_by(
        "sections", section
    ):
        return (
            "dscore-train"
            if section in ("", "optimizer", "scheduler", *CoreConfig.model_fields)
            else ""
        )
    return Plugins().models([section])[section][1].split()[0]


def every_key() -> str:
    """The tables, a section each."""
    known_departures = departures()
    absent = {word for d in known_departures if d.refused for word in d.words}
    lines = ["<!-- every key -->"]
    for section, names in REFERENCE.items():
        owner = owner_of(section)
        title = f"`{section}`" if section else "The top level"
        lines += ["", f"## {title}", ""]
        rows = list(rows_of(section, names, known_departures))
        if not owner and section in absent and all(row.state is State.NOT_OFFERED for row in rows):
            told = next(d for d in known_departures if d.refused and section in d.words)
            lines += [f"Not offered: {told.here}."]
            continue
        if owner:
            lines += [f"Package: `{owner}`.", ""]
        works = ", ".join(f"`{row.name}`" for row in rows if row.state is State.WORKS)
        lines += [f"Works as documented: {works or 'none'}."]
        others = [row for row in rows if row.state is not State.WORKS]
        if others:
            lines += ["", "| key | state | documented | here |", "|---|---|---|---|"]
            lines += [
                f"| `{r.name}` | {r.state.value} | {r.documented} | {_cell(r.here)} |"
                for r in others
            ]
    return "\n".join([*lines, "", "<!-- /every key -->"])


def _cell(text: str) -> str:
    return text.replace("|", "\\|") if "\\|" not in text else text
