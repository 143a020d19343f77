from __future__ import annotations

from xml.etree import ElementTree

import pytest
from ds_plots.svg import Svg
from ds_plots.ticks import cover, label, round_step
from hypothesis import assume, given
from hypothesis import strategies as st


@given(st.floats(-1e12, 1e12), st.floats(1e-9, 1e12))
def test_ticks_are_round_and_cover(low: float, width: float) -> None:
    assume(width > abs(low) * 1e-12)  # a chart of what floats can tell apart
    ticks = cover(low, low + width, 4)
    assert 2 <= len(ticks) <= 8
    slack = width * 1e-3 + abs(low) * 1e-9
    assert ticks[0] <= low + slack and ticks[-1] >= low + width - slack


@pytest.mark.parametrize(
    ("low", "high", "shown"),
    [
        (0, 5000, ["0", "2000", "4000", "6000"]),
        (0, 0.0006, ["0", "2e-4", "4e-4", "6e-4"]),
        (0, 0.0018, ["0", "5e-4", "1e-3", "1.5e-3", "2e-3"]),
        (2.5, 12.4, ["2.5", "5.0", "7.5", "10.0", "12.5"]),
        (0, 2.9e6, ["0", "1M", "2M", "3M"]),
        (0.2, 0.3, ["0.200", "0.225", "0.250", "0.275", "0.300"]),
        (0, 50_000, ["0", "20k", "40k", "60k"]),
    ],
)
def test_labels_of_ticks(low: float, high: float, shown: list[str]) -> None:
    ticks = cover(low, high, 4)
    assert [label(t, ticks[1] - ticks[0]) for t in ticks] == shown


@pytest.mark.parametrize(
    ("rough", "step"), [(0.7, 1), (1, 1), (1.01, 2), (30, 50), (0.006, 0.01), (0, 1), (-3, 1)]
)
def test_a_step_is_1_2_or_5_times_a_power_of_ten(rough: float, step: float) -> None:
    assert round_step(rough) == pytest.approx(step)


def test_a_document_is_xml_whatever_its_texts_are() -> None:
    svg = Svg(100, 50.5)
    svg.text(1, 2, "a < b & c", font_size=11, text_anchor="end", id='"')
    svg.polyline([(0, 1), (2.25, 3)], stroke_width=0.5)
    svg.polygon([(0, 0), (1, 0), (1, 1)])
    svg.rect(0, 0, 1, 1)
    root = ElementTree.fromstring(str(svg))
    ground, text, line, *_ = root
    assert (root.get("width"), root.get("height"), ground.get("fill")) == ("100", "50.5", "white")
    assert (text.text, text.get("font-size"), text.get("id")) == ("a < b & c", "11", '"')
    assert (line.get("points"), line.get("stroke-width")) == ("0,1 2.2,3", "0.5")
