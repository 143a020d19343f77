"""Who imports whom: the graph of this repository's modules, from their text."""

from __future__ import annotations

import ast
import functools
import gc
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path


@functools.cache
def parse(text: str) -> ast.Module:
    """`ast.parse`, once in a session for each text: many tests read the same sources."""
    gc.disable()
    try:
        return ast.parse(text)
    finally:
        # A tree is kept to the end. Else every collection would walk all trees that there are.
        gc.freeze()
        gc.enable()


def imports(tree: ast.AST) -> Iterator[str]:
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


def resolve(name: str, modules: Mapping[str, str]) -> str:
    """The module that a dotted name is or lies in; "" for one that is not in `modules`."""
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name


def graph(modules: Mapping[str, str], faces: Iterable[str] = ()) -> dict[str, set[str]]:
    """Module -> the modules it imports. faces: packages' ``__init__``, which only hand names on."""
    found: dict[str, set[str]] = {}
    for name, text in modules.items():
        targets = {resolve(target, modules) for target in imports(parse(text))}
        found[name] = targets - {name, "", *faces}
    return found


def reached(start: str, edges: Mapping[str, Iterable[str]]) -> set[str]:
    """What `start` leads to, directly or through others."""
    seen: set[str] = set()
    todo = [start]
    while todo:
        for target in set(edges.get(todo.pop(), ())) - seen:
            seen.add(target)
            todo.append(target)
    return seen


def circles(edges: Mapping[str, set[str]]) -> list[list[str]]:
    """The groups of modules that import each other, directly or through others."""
    all_reached = {name: reached(name, edges) for name in edges}
    groups = {
        frozenset(o for o in all_reached[n] if n in all_reached.get(o, ()))
        for n in edges
        if n in all_reached[n]
    }
    return sorted(sorted(group) for group in groups)


def read_modules(packages: Iterable[Path]) -> tuple[dict[str, str], list[str]]:
    """(text by module, the modules that are a package's ``__init__``)."""
    texts = {}
    faces = []
    for package in packages:
        for file in sorted(package.rglob("*.py")):
            parts = file.relative_to(package.parent).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            texts[name] = file.read_text()
            faces += [name] if parts[-1] == "__init__" else []
    return texts, faces
