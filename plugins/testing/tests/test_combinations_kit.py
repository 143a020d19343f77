"""`CombinationConformance`: what is right passes, and what is wrong in a layout is named."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import ClassVar

import pytest
from ds_testing import CombinationConformance

# So that "scaling_plugin" can be imported, on ranks too.
sys.path.insert(0, str(Path(__file__).parent))


class TestScaling(CombinationConformance):
    values: ClassVar = {
        "two": {"scaling": {}},
        "refused": {"scaling": {"refuses": "named"}},
    }
    load = ("scaling=scaling_plugin",)


class Wrong(CombinationConformance):
    load = ("scaling=scaling_plugin",)


class ByRank(Wrong):
    values: ClassVar = {"value": {"scaling": {"by": "rank"}}}


class BySlice(Wrong):
    values: ClassVar = {"value": {"scaling": {"by": "slice"}}}


class Unnamed(Wrong):
    values: ClassVar = {"value": {"scaling": {"refuses": "unnamed"}}}


@pytest.mark.fast_cases(
    "BySlice-value under 'tp': rank 0 has .* off by",
    "Unnamed-value under 'zero 1': the refusal names none of",
    "Wrong-set `values`",
)
@pytest.mark.parametrize(
    ("kit", "words"),
    [
        (ByRank, r"value under 'dp 2': rank . has .* off by"),
        (BySlice, r"value under 'tp': rank 0 has .* off by"),
        (Unnamed, r"value under 'zero 1': the refusal names none of"),
        (Wrong, "set `values`"),
    ],
)
def test_what_is_wrong_is_named(kit: type[Wrong], words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        kit().test_every_layout_trains_as_one_process_or_is_refused(2)
