"""The navigation of the site is that of docs/index.md: every page stands in one part of it."""

from __future__ import annotations

import sys
from collections import Counter

import pytest
from pages import DOCS, pages


@pytest.fixture(scope="module")
def parts() -> dict[str, list[tuple[str, str]]]:
    sys.path.insert(0, str(DOCS))
    try:
        from _site import parts
    finally:
        sys.path.remove(str(DOCS))
    return parts()


def in_the_list_of_a_folder(name: str) -> bool:
    """Whether the page is listed by the index of its folder, as decisions and kinds of plugins are."""
    folder = (DOCS / name).parent
    has_index = (folder / "index.md").exists() or folder.with_suffix(".md").exists()
    return folder != DOCS and has_index and not name.endswith("/index")


def test_parts_go_by_need(parts: dict[str, list[tuple[str, str]]]) -> None:
    assert list(parts) == [
        "Start",
        "Train",
        "Scale",
        "Save",
        "Watch",
        "Serve",
        "Move over",
        "Extend",
        "Look up",
    ]
    longest = max(parts.values(), key=len)
    assert len(longest) <= 12, f"too many to choose from: {longest}"


def test_every_page_stands_in_one_part(parts: dict[str, list[tuple[str, str]]]) -> None:
    listed = Counter(page for entries in parts.values() for page, _ in entries)
    written = {
        page.relative_to(DOCS).with_suffix("").as_posix()
        for page in pages()
        if page.is_relative_to(DOCS)
    } - {"index"}
    expected = {name for name in written if not in_the_list_of_a_folder(name)}
    assert expected - set(listed) == set(), "write them into a part of docs/index.md"
    assert set(listed) - expected == set(), "docs/index.md lists what is not there"
    assert {page for page, times in listed.items() if times > 1} == set()


def test_titles_are_plain(parts: dict[str, list[tuple[str, str]]]) -> None:
    titles = [title for entries in parts.values() for _, title in entries]
    assert not [title for title in titles if "`" in title or "<" in title]
    assert len(set(titles)) == len(titles)
