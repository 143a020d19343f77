"""No package names a config section of another: it asks by class for its own, and by trait or axis
about the rest.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from graph import parse

ROOT = Path(__file__).parents[2]
PACKAGES = [
    d
    for kind in ("plugins", "ops", "monitors")
    for d in sorted(ROOT.glob(f"{kind}/*/ds_*"))
    if d.is_dir()
]
NAMED = {
    # It speaks of DeepSpeed's keys, by their names; that is what it is for.
    "ds_deepspeed_compat",
}


def is_sections(node: ast.expr) -> bool:
    """Whether it is ``....sections``."""
    return isinstance(node, ast.Attribute) and node.attr == "sections"


def named_sections(text: str) -> list[tuple[int, str]]:
    """(line, name) of each ``.section("name")`` of a config, ``.sections["name"]`` and ``"name" in
    ....sections``.
    """
    found = []
    for node in ast.walk(parse(text)):
        name: ast.expr | None = None
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "section"
        ):
            holder = ast.unparse(node.func.value)
            name = node.args[0] if node.args and not holder.endswith("plugins") else None
        elif isinstance(node, ast.Subscript) and is_sections(node.value):
            name = node.slice
        elif isinstance(node, ast.Compare) and is_sections(node.comparators[0]):
            name = node.left
        if isinstance(name, ast.Constant) and isinstance(name.value, str):
            found.append((name.lineno, name.value))
    return found


def test_what_is_found() -> None:
    text = 'a = ctx.config.section("x")\nb = config.section(Model)\nc = "y" in config.sections\n'
    assert named_sections(text + 'd = plugins.section("z")') == [(1, "x"), (3, "y")]


def test_no_package_names_a_section() -> None:
    wrong: list[tuple[Path, int, str]] = []
    for package in PACKAGES:
        if package.name not in NAMED:
            for file in package.rglob("*.py"):
                wrong += [
                    (file.relative_to(ROOT), *row) for row in named_sections(file.read_text())
                ]
    assert not wrong, (
        f"ask for your own by class, and about others by `config.has` or mesh axes: {wrong}"
    )
