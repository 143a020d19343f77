"""The shape of the repository: the size of the core, and circles of imports at run time."""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from pathlib import Path

from distributions import PACKAGES, ROOT

sys.path.insert(0, str(Path(__file__).parent))

from graph import circles, graph, read_modules

CORE = ROOT / "ds_core"
TOKENS = 68_450
"""The core's budget, in tokens of code: lines, comments and docstrings are free, so nobody packs
lines. Why it is not less: docs/decisions/0024.
"""

FREE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def code_lines(text: str) -> int:
    """Lines that hold code: no blank lines, comments or docstrings."""
    prose: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            prose.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    rows = enumerate(text.splitlines(), 1)
    return sum(
        1
        for n, line in rows
        if line.strip() and not line.strip().startswith("#") and n not in prose
    )


def measured() -> tuple[int, int]:
    """(lines, lines of code) of the core."""
    texts = [f.read_text() for f in CORE.rglob("*.py")]
    return sum(len(t.splitlines()) for t in texts), sum(map(code_lines, texts))


def code_tokens(text: str) -> int:
    """Tokens of code: no comments, docstrings, line ends or indents."""
    docstrings: set[tuple[int, int]] = set()
    for node in ast.walk(ast.parse(text)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            docstrings.add((node.lineno, node.col_offset))
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(1 for token in tokens if token.type not in FREE and token.start not in docstrings)


def test_tokens_of_code_are_counted() -> None:
    assert (
        code_tokens(
            '"""Doc\n\nstring."""\n\n# comment\nx = 1\n\n\ndef f():\n    """Doc."""\n    return x\n'
        )
        == 10
    )


def test_lines_of_code_are_counted() -> None:
    assert (
        code_lines(
            '"""Doc\n\nstring."""\n\n# comment\nx = """a\nb"""\n\n\ndef f():\n    """Doc."""\n    '
            "return x\n"
        )
        == 4
    )


def test_the_core_keeps_to_its_budget() -> None:
    tokens = sum(code_tokens(f.read_text()) for f in CORE.rglob("*.py"))
    assert tokens < TOKENS, f"{tokens} tokens of code: give the new part a package of its own"


def test_the_guide_quotes_the_measured_size() -> None:
    said = re.search(
        r"([\d,]+) lines\s+\(([\d,]+)\s+of\s+code\)", (ROOT / "CONTRIBUTING.md").read_text()
    )
    assert said is not None, "CONTRIBUTING.md says how large the core is: 'N lines (N of code)'"
    for quoted, now in zip(said.groups(), measured(), strict=True):
        assert abs(int(quoted.replace(",", "")) - now) <= 250, (
            f"CONTRIBUTING.md says {quoted}, and it is {now:,}"
        )


# -- circles ---------------------------------------------------------------------------------------


def test_circles_are_seen() -> None:
    planted = {
        "a.x": "def f():\n    from a.y import thing\n",
        "a.y": "import a.z",
        "a.z": "from a import x",
        "a.free": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import a.up\n",
        "a.up": "import a.free",
    }
    assert circles(graph(planted)) == [["a.x", "a.y", "a.z"]]


def test_no_modules_import_each_other_at_run_time() -> None:
    assert circles(graph(*read_modules(PACKAGES))) == []


def test_no_package_hands_on_a_name_that_is_a_module_of_its_own() -> None:
    """Whoever imports the module first makes the name that module, for everybody."""
    taken = [
        f"{stub.parent.relative_to(ROOT)}: {name}"
        for package in PACKAGES
        for stub in package.rglob("__init__.pyi")
        for name in re.findall(r"\bas (\w+)$", stub.read_text(), re.MULTILINE)
        if (stub.parent / name).is_dir() or (stub.parent / f"{name}.py").exists()
    ]
    assert not taken
