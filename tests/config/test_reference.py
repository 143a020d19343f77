"""Every key of the configuration reference is accepted and has an effect, or docs/differences.md
names it.

``reference_keys.json`` has the keys that DeepSpeed's documents describe, by section ("": the top
level), at any depth.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ds_core.catalogue import known, offered_by
from ds_core.config.keys import Key
from ds_core.config.section import NOT_OFFERED, WITHOUT_EFFECT, marks

sys.path.insert(0, str(Path(__file__).parents[1] / "docs"))

from config_keys import REFERENCE as KEYS
from config_keys import keys_of, parameters_of_optimizers

PAGE = (Path(__file__).parents[2] / "docs" / "differences.md").read_text()
NAMED = {word for code in re.findall(r"`([^`]+)`", PAGE) for word in re.findall(r"\w+", code)}
"""Every word in code on the page."""


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
    assert missing <= NAMED, (
        f"{section}: docs/differences.md does not say what becomes of {sorted(missing - NAMED)}"
    )


def test_each_parameter_of_an_optimizer_is_taken_by_one() -> None:
    assert set(KEYS["optimizer.params"]) - parameters_of_optimizers() == set()


def test_a_key_that_is_lost_would_be_seen() -> None:
    assert list(departures("zero_optimization", ["stage", "of_no_document"])) == ["of_no_document"]
    assert list(departures("", ["fp16", "amp", "steps_per_print"])) == ["amp"]
    assert sum(map(len, KEYS.values())) > 400
