"""Every error message of the code, by class: the long list behind docs/errors.md."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

HEAD = """# All error messages

Every message in the code, by class, where it is written in one piece; `…` stands for what it names. What the frequent
ones mean: [Errors](../errors.md).
"""


def message_pages(root: Path) -> dict[str, str]:
    """The list of all messages."""
    parts = [HEAD]
    for name, rows in sorted(messages(root).items()):
        lines = ["| message | module |", "| --- | --- |"]
        lines += [
            f"| {_cell(text)} | `{module}` |"
            for text, module in sorted(rows, key=lambda r: (r[1], r[0]))
        ]
        parts += [f"## {name}", "\n".join(lines)]
    return {"messages.md": "\n\n".join(parts) + "\n"}


def messages(root: Path) -> dict[str, list[tuple[str, str]]]:
    """Error class -> (message, module). Problems of a config are ConfigErrors."""
    classes = error_classes(root)
    found: dict[str, list[tuple[str, str]]] = {}
    for file in sources(root):
        if "Error(" not in file.read_text() and "Problem(" not in file.read_text():
            continue
        module = module_of(file, root)
        for function, call in calls(parse(file)):
            name = (
                call.func.attr
                if isinstance(call.func, ast.Attribute)
                else getattr(call.func, "id", "")
            )
            at = 1 if name == "Problem" else 0
            if (name != "Problem" and name not in classes) or len(call.args) <= at:
                continue
            fix = template(call.args[2]) if name == "Problem" and len(call.args) > 2 else ""
            for said in written(call.args[at], function):
                text = "; ".join(filter(None, [said, fix]))
                if re.search(r"[a-z]{3}", text):
                    error = "ConfigError" if name == "Problem" else name
                    found.setdefault(error, []).append((text, module))
    return {name: sorted(set(rows)) for name, rows in found.items()}


def calls(tree: ast.AST, function: ast.AST | None = None) -> Iterator[tuple[ast.AST, ast.Call]]:
    """Every call below `tree`, with the innermost function that it is in, or the module."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Call):
            yield function or tree, node
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        yield from calls(node, node if is_function else function or tree)


def written(node: ast.expr, function: ast.AST) -> list[str]:
    """The texts that a message can have; of a variable, what `function` assigns to it."""
    if not isinstance(node, ast.Name):
        return [template(node)]
    return [
        template(line.value)
        for line in ast.walk(function)
        if isinstance(line, ast.Assign)
        and any(isinstance(t, ast.Name) and t.id == node.id for t in line.targets)
    ]


def error_classes(root: Path) -> dict[str, str]:
    """Every error class of the core and the packages -> its module; those that a test raises are
    not ours.
    """
    found = {"DSError": "ds_core.errors"}
    grew = True
    defined = [
        (node, module_of(file, root))
        for file in sources(root)
        for node in parse(file).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]
    while grew:
        grew = False
        for node, module in defined:
            bases = {getattr(base, "id", getattr(base, "attr", "")) for base in node.bases}
            if node.name not in found and not bases.isdisjoint(found):
                found[node.name] = module
                grew = True
    return found


@cache
def parse(file: Path) -> ast.Module:
    """The parsed module."""
    return ast.parse(file.read_text())


def sources(root: Path) -> Iterator[Path]:
    """The modules of the core and of every package."""
    for folder in ["ds_core", *(f"{part}/*/ds_*" for part in ("plugins", "ops", "monitors"))]:
        yield from sorted(root.glob(f"{folder}/**/*.py"))


def module_of(file: Path, root: Path) -> str:
    """The dotted name of a module."""
    parts = file.relative_to(root).with_suffix("").parts
    return ".".join(parts if parts[0] == "ds_core" else parts[2:]).removesuffix(".__init__")


def template(node: ast.expr) -> str:
    """The text of a message with `…` for what is filled in; "" for one that is not written
    there."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(
            part.value if isinstance(part, ast.Constant) else "…" for part in node.values
        )
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return (template(node.left) or "…") + (template(node.right) or "…")
    return ""


def _cell(text: str) -> str:
    plain = " ".join(text.split()).replace("|", "\\|").replace("``", "`")
    return re.sub(r"([*_<\[\]])", r"\\\1", plain) if "`" not in plain else plain.replace("<", "\\<")
