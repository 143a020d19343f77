"""Helpers of tests that every file once had for itself: `ds_testing.truth` has them."""

from __future__ import annotations

import re
from collections import Counter

from distributions import ROOT

# How many test files define a function of the name. Numbers go down only.
DEFINED = {"start": 3, "train": 1, "plain": 1, "build": 0, "compare": 0, "same": 0}


def test_helpers_of_truth_are_not_written_again() -> None:
    """A function that is about something else says so by its name."""
    pattern = re.compile(rf"^def ({'|'.join(DEFINED)})\(", re.MULTILINE)
    found: Counter[str] = Counter()
    places = []
    for file in [*ROOT.glob("tests/**/*.py"), *ROOT.glob("[pmo]*/*/tests/**/*.py")]:
        for name in pattern.findall(file.read_text(encoding="utf-8")):
            found[name] += 1
            places.append(f"{file.relative_to(ROOT)}: {name}")
    assert {name: found[name] for name in DEFINED} == DEFINED, "\n".join(sorted(places))
