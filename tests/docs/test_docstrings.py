"""Docstrings on the site: lines of arguments are lists, and everything else is what it was."""

from __future__ import annotations

import importlib.util
from typing import Any

from pages import DOCS

spec = importlib.util.spec_from_file_location("site_docstrings", DOCS / "_site" / "docstrings.py")
assert spec is not None and spec.loader is not None
module: Any = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)

WRITTEN = """Summary.

Text that takes
two lines.

first, second: what they are, which
    takes more than a line.
other: what it is.
Text after them.

Code::

    x: int
    y: int

Raises UsageError: never."""

READ = """Summary.

Text that takes
two lines.

- first, second: what they are, which takes more than a line.
- other: what it is.

Text after them.

Code::

    x: int
    y: int

Raises UsageError: never.
"""


def test_lines_of_arguments_are_a_list() -> None:
    assert "\n".join(module.listed(WRITTEN.splitlines())) == READ


def test_a_line_that_looks_like_an_argument_alone_is_one() -> None:
    assert module.listed(["folder: where it lies."]) == ["- folder: where it lies.", ""]


def test_lists_and_tables_stay() -> None:
    lines = ["- one: two", "  three", "- four"]
    assert module.listed(lines) == [*lines, ""]
