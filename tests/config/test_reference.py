"""Every key of the configuration reference is accepted and has an effect, or docs/differences.md names it.

``reference_keys.json`` has the keys that DeepSpeed's documents describe, by section ("": the top level), at any depth.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ds_core.catalogue import known, offered_by
from ds_core.config import CoreConfig
from ds_core.config.keys import Key, iter_keys
from ds_core.config.section import NOT_OFFERED, WITHOUT_EFFECT, marks
from ds_core.entries import resolve
from ds_core.plugins import Plugins

KEYS: dict[str, list[str]] = json.loads(Path(__file__).with_name("reference_keys.json").read_text())
PAGE = (Path(__file__).parents[2] / "docs" / "differences.md").read_text()
NAMED = {word for code in re.findall(r"`([^`]+)`", PAGE) for word in re.findall(r"\w+", code)}
"""Every word in code on the page."""


def keys_of(section: str) -> list[Key]:
    """The keys of `section`, which a plugin owns or the core."""
    if section and offered_by("sections", section):
        model, _ = Plugins().models([section])[section]
        return list(iter_keys(model))
    return [key for key in iter_keys(CoreConfig) if key.path.startswith(f"{section}." if section else "")]


def works(key: Key) -> bool:
    return not {NOT_OFFERED, WITHOUT_EFFECT} & set(marks(key.field))


def departures(section: str, keys: list[str]) -> Iterator[str]:
    """Those of `keys` that are no keys of `section`, or have no effect there."""
    there = keys_of(section)
    for name in keys:
        is_section = not section and name in known("sections") and offered_by("sections", name)
        if not is_section and not any(works(key) for key in there if key.spelling == name):
            yield name


@pytest.mark.parametrize("section", [name for name in KEYS if name != "optimizer.params"])
def test_each_key_has_its_effect_or_is_named(section: str) -> None:
    missing = set(departures(section, KEYS[section]))
    if section and f"| `{section}` |" in PAGE.partition("## Not offered")[2]:
        missing.clear()  # all of it is named at once
    assert missing <= NAMED, f"{section}: docs/differences.md does not say what becomes of {sorted(missing - NAMED)}"


def parameters(entry: Any) -> set[str]:
    if entry.params is not None:
        return {key.spelling for key in iter_keys(resolve(entry.params))}
    return set(inspect.signature(resolve(entry.load)).parameters)


def test_each_parameter_of_an_optimizer_is_taken_by_one() -> None:
    entries = [entry for answer in Plugins().offers("ds_optimizers") for entry in answer.value.values()]
    found = set().union(*map(parameters, entries))
    assert set(KEYS["optimizer.params"]) - found == set()


def test_a_key_that_is_lost_would_be_seen() -> None:
    assert list(departures("zero_optimization", ["stage", "of_no_document"])) == ["of_no_document"]
    assert list(departures("", ["fp16", "amp", "steps_per_print"])) == ["amp"]
    assert sum(map(len, KEYS.values())) > 400
