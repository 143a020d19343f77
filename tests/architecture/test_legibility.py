"""How code is laid out: one thought a line, reasons where the eye is, files and functions that fit.

`legibility.py` measures, and says by ``--list PACKAGE`` which lines are meant.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from pathlib import Path

import pytest
from distributions import PACKAGES, ROOT

sys.path.insert(0, str(Path(__file__).parent))

from legibility import crowded, functions, measure, measure_text, modules, packed_lines, unformatted

PACKED = 2.0
"""Per 1,000 lines of code."""
WIDE = 1.0
"""Percent of all lines."""
LONGEST_FILE = 500
LONGEST_FUNCTION = 60
MODULES = 12
"""In one folder of a package, ``__init__.py`` not counted."""
COMMENTS = {
    "ds_core": 4.0,
    "ds_checkpoint": 4.0,
    "ds_inference": 4.0,
    "ds_moe": 4.0,
    "ds_pipeline": 4.0,
    "ds_sequence_parallel": 4.0,
    "ds_tensor_parallel": 4.0,
    "ds_zero": 4.0,
}
"""Comment lines per 100 lines of code, at least, in the packages whose algorithms need reasons."""

SOURCES = sorted(
    file
    for top in ("ds_core", "plugins", "ops", "monitors", "tests", "benchmarks", "examples", "docs")
    for kind in ("*.py", "*.pyi", "*.cpp", "*.h", "*.cu")
    for file in (ROOT / top).rglob(kind)
    # frozen copies of plugins that others wrote; what is built
    if not {"before_kits", "contract_1", "build"} & set(file.relative_to(ROOT).parts)
)


# -- the measuring ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("a = 1; b = 2", [1]),
        ("if x: y()", [1]),
        ("a, b = f(), g()", [1]),
        ("a, b = b, a", []),
        ("a, b = f()", []),
        ("a = b = 1", []),
        ("def f(): ...\ndef g():\n    return 1", []),
        ("class A: x = 1; y = 2", [1]),
    ],
)
def test_lines_with_more_than_one_thought(text: str, lines: list[int]) -> None:
    assert packed_lines(ast.parse(text)) == lines


def test_code_comments_and_width() -> None:
    wide = "x" * 101
    text = f'"""Doc\nstring."""\n\n# why\nx = """a\nb"""  # and why\ny = 1  # noqa: E1\n# {wide}\n'
    found = measure_text(text)
    assert (found.lines, found.code, found.comments, found.wide) == (8, 3, 3, 1)
    assert found.comment_rate == 100 and found.wide_rate == 12.5
    assert (found + found).code == 6


def test_attributes_in_running_text() -> None:
    running = "a: one. b: two; c: three. d, e: four. f: five."
    assert crowded(f"Summary.\n\n{running}") == 1
    assert crowded("Summary.\n\na: one.\nb: two.\n\nc: three. d: four. e: five. f: six.") == 0
    assert measure_text(f'class A:\n    """{running}"""\n').paragraphs == 1
    assert measure_text(f'def f():\n    """{running}"""\n').paragraphs == 0


def test_length_of_functions() -> None:
    text = "@wraps(\n    g\n)\ndef f():\n    def inner():\n        pass\n    return inner\n"
    assert dict(functions(text)) == {"f": 4, "inner": 2}


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("x = [\n  1,\n]  # fmt: skip", []),
        ("@cases([\n  1,\n])  # fmt: skip\ndef f(): ...", []),
        ("x = [1]  # fmt: skip", [1]),
        ("f(\n  a)  # fmt: skip", [2]),
        ("# fmt: off\nx = 1", [1]),
    ],
)
def test_only_tables_keep_their_own_form(text: str, lines: list[int]) -> None:
    assert unformatted(text) == lines


# -- the packages ----------------------------------------------------------------------------------


@pytest.mark.parametrize("package", PACKAGES, ids=lambda p: p.name)
def test_one_thought_a_line(package: Path) -> None:
    found = measure(modules(package))
    listing = f"python tests/architecture/legibility.py --list {package.name}"
    assert found.packed_rate <= PACKED, listing
    assert found.wide_rate <= WIDE, listing
    assert found.paragraphs == 0, listing
    assert found.comment_rate >= COMMENTS.get(package.name, 0), (
        f"{found.comment_rate:.1f} comment lines per 100 lines of code: say why, where it stands"
    )


@pytest.mark.parametrize("package", PACKAGES, ids=lambda p: p.name)
def test_a_folder_shows_a_dozen_modules(package: Path) -> None:
    count = Counter(f.parent for f in modules(package) if f.name != "__init__.py")
    crowds = {folder.relative_to(ROOT).as_posix(): n for folder, n in count.items()}
    assert {f: n for f, n in crowds.items() if n > MODULES} == {}


def test_no_file_is_long() -> None:
    long = {
        file.relative_to(ROOT).as_posix(): lines
        for file in SOURCES
        if (lines := len(file.read_text().splitlines())) > LONGEST_FILE
    }
    assert long == {}


def test_functions_fit_on_a_screen() -> None:
    long = {
        f"{file.relative_to(ROOT).as_posix()}:{name}": lines
        for file in SOURCES
        if file.suffix == ".py"
        for name, lines in functions(file.read_text())
        if lines > LONGEST_FUNCTION
    }
    assert long == {}


def test_only_tables_are_spared_by_the_formatter() -> None:
    found = {
        file.relative_to(ROOT).as_posix(): lines
        for file in SOURCES
        if file.suffix == ".py" and file != Path(__file__)
        if (lines := unformatted(file.read_text()))
    }
    assert found == {}
