"""Decision records have one form, consecutive numbers, and a row in their table."""

from __future__ import annotations

import re

import pytest
from pages import DOCS

FOLDER = DOCS / "decisions"
RECORDS = sorted(FOLDER.glob("[0-9]*.md"))
ROW = re.compile(r"^\| \[(\d{4})\]\(([\w-]+\.md)\) \| (.+) \|$", re.MULTILINE)


def test_the_table_has_them_all_in_order() -> None:
    rows = ROW.findall((FOLDER / "index.md").read_text())
    assert [file for _, file, _ in rows] == [record.name for record in RECORDS]
    assert [int(number) for number, _, _ in rows] == list(range(1, len(RECORDS) + 1))
    titles = [record.read_text().partition("\n")[0].partition(". ")[2] for record in RECORDS]
    assert [title for _, _, title in rows] == titles


@pytest.mark.parametrize("name", [record.name for record in RECORDS])
def test_a_record_is_short_and_has_its_parts(name: str) -> None:
    text = (FOLDER / name).read_text()
    assert text.startswith(f"# {int(name[:4])}. ")
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == ["Context", "Decision", "Consequences"]
    assert len(text.splitlines()) <= 40
