"""docs/differences.md stays one table of decisions per area, however many hands append to it."""

from __future__ import annotations

from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "differences.md"


def test_every_row_says_what_is_documented_what_is_here_and_why() -> None:
    _, *areas = PAGE.read_text().split("\n## ")
    assert len(areas) >= 11
    for area in areas:
        title, blank, *lines = area.rstrip("\n").split("\n")
        here = "here"
        if title == "Not offered":
            here = "what to use"
            lines = lines[2:]  # a sentence that says what the table is
        head, line, *rows = lines
        assert (blank, head, line) == ("", f"| documented | {here} | why |", "|---|---|---|"), title
        for row in rows:
            cells = [cell.strip() for cell in row.strip("|").split(" | ")]
            assert len(cells) == 3 and all(cells), f"{title}: {row}"
        assert len(set(rows)) == len(rows), f"{title}: a row stands twice"
