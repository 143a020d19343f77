"""The shape of the repository: the size of the core, and circles of imports at run time."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
CORE = ROOT / "ds_core"
PACKAGES = [
    CORE,
    *sorted(
        d
        for kind in ("plugins", "ops", "monitors")
        for d in ROOT.glob(f"{kind}/*/ds_*")
        if d.is_dir()
    ),
]
TOKENS = 68_500
"""The core's budget, in tokens of code: lines, comments and docstrings are free, so nobody packs
lines.
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


def test_the_readme_quotes_the_measured_size() -> None:
    said = re.search(r"([\d,]+) lines\s+\(([\d,]+)\s+of\s+code\)", (ROOT / "README.md").read_text())
    assert said is not None, "README.md says how large the core is: 'N lines (N of code)'"
    for quoted, now in zip(said.groups(), measured(), strict=True):
        assert abs(int(quoted.replace(",", "")) - now) <= 250, (
            f"README.md says {quoted}, and it is {now:,}"
        )


# -- circles ---------------------------------------------------------------------------------------


def imports(tree: ast.AST, name: str) -> Iterator[str]:
    """Dotted names that a module imports when it runs, also inside functions; not those under
    TYPE_CHECKING.
    """
    skipped: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            skipped.update(id(inner) for child in node.body for inner in ast.walk(child))
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def graph(modules: Mapping[str, str], faces: Iterable[str] = ()) -> dict[str, set[str]]:
    """Module -> the modules it imports. faces: packages' ``__init__``, which only hand names on."""
    found: dict[str, set[str]] = {}
    for name, text in modules.items():
        targets: set[str] = set()
        for target in imports(ast.parse(text), name):
            while target and target not in modules:  # a name in a module
                target = target.rpartition(".")[0]
            targets.add(target)
        found[name] = targets - {name, "", *faces}
    return found


def circles(edges: Mapping[str, set[str]]) -> list[list[str]]:
    """The groups of modules that import each other, directly or through others."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        todo = [start]
        while todo:
            for target in edges.get(todo.pop(), set()) - seen:
                seen.add(target)
                todo.append(target)
        return seen

    all_reached = {name: reached(name) for name in edges}
    groups = {
        frozenset(o for o in all_reached[n] if n in all_reached.get(o, ()))
        for n in edges
        if n in all_reached[n]
    }
    return sorted(sorted(group) for group in groups)


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
    texts = {}
    faces = []
    for package in PACKAGES:
        for file in package.rglob("*.py"):
            parts = file.relative_to(package.parent).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            texts[name] = file.read_text()
            faces += [name] if parts[-1] == "__init__" else []
    assert circles(graph(texts, faces)) == []
