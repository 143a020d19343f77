"""How code is laid out, by package: ``python tests/architecture/legibility.py [--list PACKAGE]``.

packed: statements that share a line with another, and tuples of unrelated values assigned at once,
per 1,000 lines of code. comments: comment lines per 100 lines of code. wide: lines of more than 100
columns, in percent. paragraphs: class docstrings that describe five or more attributes in running
text. For comparison, pluggy, pytest and torch's FSDP2 measure packed 0-4, comments 6-15, wide 0-1.
"""

from __future__ import annotations

import ast
import gc
import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from graph import parse  # noqa: E402

ROOT = Path(__file__).parents[2]
WIDTH = 100
ATTRIBUTES = 5
"""Attributes in one paragraph of a class docstring from which on it should be taken apart."""

DIRECTIVE = re.compile(r"#\s*(noqa|type:|fmt:|mypy:|pragma)")
"""Comments for tools; they explain nothing to a reader."""
DESCRIBED = re.compile(r"(?:^|[.;] |\. *\n\s*)\w+(?:, \w+)*: ")
"""The beginning of a description such as ``name: text`` in running text."""
STRING_OR_COMMENT = re.compile(
    r'"""(?:[^\\]|\\.)*?"""|'
    + r"'''(?:[^\\]|\\.)*?'''"
    + r'|"(?:[^"\\\n]|\\.)*"'
    + r"|'(?:[^'\\\n]|\\.)*'|#[^\n]*",
    re.DOTALL,
)
"""Whatever comes first is one: no comment begins in a string, and no string in a comment."""
BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")
TABLES = (ast.Dict, ast.List, ast.Tuple, ast.Set)


@dataclass(frozen=True)
class Measure:
    """The counts of some files, and the rates that are held."""

    lines: int = 0
    code: int = 0
    packed: int = 0
    comments: int = 0
    wide: int = 0
    paragraphs: int = 0

    def __add__(self, other: Measure) -> Measure:
        return Measure(
            self.lines + other.lines,
            self.code + other.code,
            self.packed + other.packed,
            self.comments + other.comments,
            self.wide + other.wide,
            self.paragraphs + other.paragraphs,
        )

    @property
    def packed_rate(self) -> float:
        """Per 1,000 lines of code."""
        return 1000 * self.packed / max(self.code, 1)

    @property
    def comment_rate(self) -> float:
        """Per 100 lines of code."""
        return 100 * self.comments / max(self.code, 1)

    @property
    def wide_rate(self) -> float:
        """Percent of all lines."""
        return 100 * self.wide / max(self.lines, 1)


def packed_lines(tree: ast.AST) -> list[int]:
    """Numbers of the lines that hold more than one thought.

    A swap, or the unpacking of a call, is one thought.
    """
    found = set()
    first: dict[int, ast.stmt] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target = node.targets[0]
            value = node.value
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                names = {ast.unparse(each) for each in target.elts}
                values = {ast.unparse(each) for each in value.elts}
                if len(target.elts) == len(value.elts) > 1 and not names & values:
                    found.add(node.lineno)
        # A definition is not counted: its decorators and body have lines of their own.
        if isinstance(node, ast.stmt) and not isinstance(
            node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        ):
            if first.setdefault(node.lineno, node) is not node:
                found.add(node.lineno)
    return sorted(found)


def docstrings(tree: ast.AST) -> Iterator[tuple[ast.AST, ast.Expr, str]]:
    """(owner, statement, text) of each docstring."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)):
            doc = node.body[0] if node.body else None
            if isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant):
                if isinstance(doc.value.value, str):
                    yield node, doc, doc.value.value


def crowded(docstring: str) -> int:
    """Paragraphs that describe `ATTRIBUTES` or more names in running text."""
    paragraphs = docstring.split("\n\n")
    return sum(len(DESCRIBED.findall(each)) >= ATTRIBUTES for each in paragraphs)


def comments_and_code(text: str) -> tuple[int, set[int]]:
    """(comments that are no directives, numbers of the lines that hold code)."""
    comments = 0

    def blank(found: re.Match[str]) -> str:
        nonlocal comments
        token = found[0]
        if token[0] == "#":
            comments += not DIRECTIVE.match(token)
            return ""
        # Every line of a string is one of code, also an empty one.
        return "\n".join("s" for _ in token.split("\n"))

    rows = STRING_OR_COMMENT.sub(blank, text).split("\n")
    return comments, {number for number, row in enumerate(rows, 1) if row.strip()}


def measure_text(text: str) -> Measure:
    """The counts of one module."""
    tree = parse(text)
    rows = text.splitlines()
    comments, code = comments_and_code(text)
    paragraphs = 0
    for owner, doc, words in docstrings(tree):
        code.difference_update(range(doc.lineno, (doc.end_lineno or doc.lineno) + 1))
        if isinstance(owner, ast.ClassDef):
            paragraphs += crowded(words)
    return Measure(
        lines=len(rows),
        code=len(code),
        packed=len(packed_lines(tree)),
        comments=comments,
        wide=sum(len(row) > WIDTH for row in rows),
        paragraphs=paragraphs,
    )


def measure(files: Iterable[Path]) -> Measure:
    """The counts of `files` together."""
    return sum((measure_text(file.read_text()) for file in files), Measure())


def modules(package: Path) -> list[Path]:
    """The modules of a package; templates of generated code are not its own."""
    return sorted(f for f in package.rglob("*.py") if "templates" not in f.parts)


def functions(text: str) -> Iterator[tuple[str, int]]:
    """(name, lines) of each function, decorators not counted; nested ones too."""
    gc.disable()
    todo: list[ast.AST] = [ast.parse(text)]
    gc.enable()
    while todo:
        node = todo.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.name, (node.end_lineno or node.lineno) - node.lineno + 1
        # A function stands in a block of another statement, never in an expression.
        for block in BLOCKS:
            todo += getattr(node, block, ())


def is_table(node: ast.AST) -> bool:
    """Whether it is a dict, list, tuple or set that is written over several lines."""
    return isinstance(node, TABLES) and (node.end_lineno or node.lineno) > node.lineno


def unformatted(text: str) -> list[int]:
    """Lines where ``fmt: skip`` spares something else than a table, and each ``fmt: off``."""
    if "fmt:" not in text:
        return []
    ends: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        # A decorator ends before the statement that it belongs to.
        owners = node.decorator_list if isinstance(node, ast.FunctionDef) else [node]
        for owner in owners:
            if isinstance(owner, (ast.stmt, ast.expr)) and any(map(is_table, ast.walk(owner))):
                ends.add(owner.end_lineno or owner.lineno)
    found = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            skips = "fmt: skip" in token.string and token.start[0] not in ends
            if skips or "fmt: off" in token.string:
                found.append(token.start[0])
    return found


def main(words: list[str]) -> None:
    """Print the table, or with ``--list PACKAGE`` what is packed, wide or crowded in a package."""
    from distributions import PACKAGES

    if words[:1] == ["--list"]:
        for file in modules(next(p for p in PACKAGES if p.name == words[1])):
            text = file.read_text()
            tree = ast.parse(text)
            place = file.relative_to(ROOT)
            for line in packed_lines(tree):
                print(f"{place}:{line}: packed")
            for line, row in enumerate(text.splitlines(), 1):
                if len(row) > WIDTH:
                    print(f"{place}:{line}: {len(row)} columns")
            for owner, doc, said in docstrings(tree):
                if isinstance(owner, ast.ClassDef) and crowded(said):
                    print(
                        f"{place}:{doc.lineno}: {owner.name} describes attributes in running text"
                    )
        return
    rows = sorted(((p.name, measure(modules(p))) for p in PACKAGES), key=lambda row: -row[1].lines)
    total = sum((each for _, each in rows), Measure())
    print(f"{'package':27} {'lines':>7} {'code':>7} packed comments wide % paragraphs")
    for name, each in [*rows, ("all", total)]:
        print(
            f"{name:27} {each.lines:7} {each.code:7} {each.packed_rate:6.1f} "
            f"{each.comment_rate:8.1f} {each.wide_rate:6.1f} {each.paragraphs:10}"
        )


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "tests"))
    main(sys.argv[1:])
