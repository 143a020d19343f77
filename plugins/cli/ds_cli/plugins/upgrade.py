"""``dscore plugins upgrade``: rewrite a plugin's sources for names that have moved in ds_core (no
torch).
"""

from __future__ import annotations

import ast
import difflib
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer
from ds_command_kit.show import CommandError, say_error

from ds_core import moved
from ds_core.plugins import old_forms

TEXTS = (".py", ".toml", ".cfg", ".json", ".yaml", ".yml", ".md", ".jinja")
SKIPPED = {".git", ".venv", "build", "dist", "__pycache__", "node_modules"}


def upgrade(
    path: Annotated[
        Path, typer.Argument(metavar="PATH", help="A file or a folder of the plugin's sources.")
    ],
    check: Annotated[
        bool, typer.Option("--check", help="Show what would change, and change nothing.")
    ] = False,
) -> None:
    """Rewrite names of earlier versions of ds_core to those of today, and say what is to be changed
    by hand.

    Exit codes:
      0: done; stderr says what is left to change by hand
      1: with --check, something is to be changed

    Examples:
      dscore plugins upgrade --check src
      dscore plugins upgrade src
    """
    if not path.exists():
        raise CommandError(f"no such file or folder: {str(path)!r}")
    changed = 0
    needed: set[str] = set()
    by_hand: list[str] = []
    for file in _files(path):
        try:
            old = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CommandError(f"cannot read {file}: {error}") from error
        new = rewritten(old, code=file.suffix == ".py")
        if file.suffix == ".py":
            by_hand += [f"{file}:{line}: {what}" for line, what in _old_forms(old)]
        if new == old:
            continue
        changed += 1
        needed |= _packages(new) - _packages(old)
        if check:
            typer.echo("".join(_diff(file, old, new)), nl=False)
        else:
            try:
                file.write_text(new, encoding="utf-8")
            except OSError as error:
                raise CommandError(f"cannot write {file}: {error.strerror}") from error
            typer.echo(str(file))
    for line in by_hand:
        say_error(f"by hand: {line}")
    if needed:
        dists = ", ".join(sorted("dscore-" + name[3:].replace("_", "-") for name in needed))
        say_error(f"by hand: add to the dependencies in pyproject.toml: {dists}")
    what = "would change" if check else "changed"
    typer.echo(f"{changed} files {what}, {len(by_hand)} places to change by hand")
    if check and (changed or by_hand):
        raise typer.Exit(1)


def _files(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
        return
    for file in sorted(path.rglob("*")):
        if file.suffix in TEXTS and file.is_file() and not SKIPPED & set(file.parts):
            yield file


def rewritten(text: str, *, code: bool = True) -> str:
    """`text` with today's names.

    code: it is Python, whose imports of single names are divided by their new homes.
    """
    if code:
        text = _imports(_methods(text))
    # Modules below one that has moved moved with it, so whole dotted names are looked up.
    return re.sub(r"(?<![\w.])ds_\w+(?:\.\w+)+", lambda name: moved.now(name[0]) or name[0], text)


def _methods(text: str) -> str:
    """Methods of subclasses of our contracts, and calls of them in the class."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return text
    lines = text.splitlines(keepends=True)
    for node in ast.walk(tree):
        if not isinstance(node, ast.ClassDef):
            continue
        bases = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
        for base in moved.METHODS.keys() & bases:
            for old, new in moved.METHODS[base].items():
                pattern = rf"(\bdef |\bself\.|\bsuper\(\)\.){old}\("
                for row in range(node.lineno - 1, node.end_lineno or node.lineno):
                    lines[row] = re.sub(pattern, rf"\g<1>{new}(", lines[row])
    return "".join(lines)


def _imports(text: str) -> str:
    """Names that left a module: ``from old import a, b`` becomes one import for each new home."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return text
    lines = text.splitlines(keepends=True)
    found = [
        n
        for n in ast.walk(tree)
        if isinstance(n, ast.ImportFrom) and not n.level and n.module in moved.NAMES
    ]
    renamed: dict[str, str] = {}
    for node in sorted(found, key=lambda n: -n.lineno):
        homes: dict[str, list[str]] = {}
        stays = moved.MODULES.get(str(node.module), str(node.module))
        for alias in node.names:
            target = moved.NAMES[str(node.module)].get(alias.name)
            home, name = target.split(":") if target is not None else (stays, alias.name)
            if target is not None and name != alias.name and alias.asname is None:
                renamed[alias.name] = name
            homes.setdefault(home, []).append(f"{name} as {alias.asname}" if alias.asname else name)
        if list(homes) == [node.module]:
            continue
        space = " " * node.col_offset
        rows = [f"{space}from {home} import {', '.join(names)}\n" for home, names in homes.items()]
        lines[node.lineno - 1 : node.end_lineno] = rows
    text = "".join(lines)
    for old, new in renamed.items():
        text = re.sub(rf"(?<![\w.]){re.escape(old)}(?!\w)", new, text)
    return text


def _old_forms(text: str) -> Iterator[tuple[int, str]]:
    """Hooks of an earlier form, by line, with what to write instead; they work on, with a
    warning."""
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        yield error.lineno or 1, f"this is no Python that can be read: {error.msg}"
        return
    hooks = {
        n.name: n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name.startswith("ds_")
    }
    stand_ins = {name: _stand_in([a.arg for a in node.args.args]) for name, node in hooks.items()}
    for is_old, instead, _ in old_forms.FORMS:
        if is_old(stand_ins):
            name = next((n for n in hooks if n in instead), next(iter(hooks)))
            yield hooks[name].lineno, instead
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and any(
            ast.unparse(base).endswith("Partitioner") for base in node.bases
        ):
            methods = {
                n.name: [a.arg for a in n.args.args]
                for n in node.body
                if isinstance(n, ast.FunctionDef)
            }
            if methods.get("finish") == ["self"] or methods.get("begin") == ["self", "changed"]:
                yield (
                    node.lineno,
                    "Partitioner.begin and finish take a BackwardPlan, attach takes updated=",
                )


def _stand_in(arguments: list[str]) -> Callable[..., None]:
    """A function with these arguments, for what asks for its signature."""

    def stand_in() -> None:
        pass

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    stand_in.__signature__ = inspect.Signature([inspect.Parameter(a, kind) for a in arguments])  # type: ignore[attr-defined]
    return stand_in


def _packages(text: str) -> set[str]:
    """The packages of ours that are named in imports and references."""
    return (
        set(re.findall(r"(?<![\w.])(ds_[a-z_]+)(?=[.:\s])", text)) - {"ds_core"}
        if "ds_" in text
        else set()
    )


def _diff(file: Path, old: str, new: str) -> Iterator[str]:
    rows = difflib.unified_diff(old.splitlines(True), new.splitlines(True), str(file), str(file))
    return (row if row.endswith("\n") else f"{row}\n" for row in rows)
