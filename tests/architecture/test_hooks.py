"""Every hook has a heading with its exact signature in docs/architecture.md, and a test that uses
it.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SPECIFICATIONS = [
    ROOT / "ds_core" / "plugins" / "hookspecs.py",
    *sorted(ROOT.glob("plugins/*/ds_*/hookspecs.py")),
]
MOST = 34
"""Hooks of the core: what the author of a plugin may have to learn."""
DOCUMENT = ROOT / "docs" / "architecture.md"


def signatures() -> dict[str, str]:
    """Hook name -> its signature as the specification file has it, ``ds_check(config: RunConfig) ->
    ...``.
    """
    hooks: list[ast.FunctionDef] = []
    for file in SPECIFICATIONS:
        # headings have names of entries alone
        tree = ast.parse(re.sub(r"(?<=[ \[])entries\.", "", file.read_text()))
        hooks += [
            n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name.startswith("ds_")
        ]
    return {
        n.name: f"{n.name}({ast.unparse(n.args)}) -> {ast.unparse(n.returns)}"
        for n in hooks
        if n.returns
    }


def test_the_specifications_are_read() -> None:
    found = signatures()
    assert found["ds_config"] == "ds_config() -> type[BaseModel] | Mapping[str, type[BaseModel]]"
    assert len(found) >= 18


def test_every_hook_has_its_heading_and_no_heading_lacks_its_hook() -> None:
    headings = re.findall(r"^###+ `(ds_\w+\(.*)`\s*$", DOCUMENT.read_text(), flags=re.MULTILINE)
    assert sorted(headings) == sorted(signatures().values())


def test_every_hook_is_documented_where_it_is_specified() -> None:
    from ds_core.plugins.discovery import CORE_HOOKS, HOOKS

    assert set(HOOKS) >= set(signatures())
    assert len(CORE_HOOKS) <= MOST
    for name in signatures():
        text = HOOKS[name].__doc__ or ""
        assert re.match(r"(Driver|Hook)\b", text), (
            f"{name}: say first whether it is a driver or a hook"
        )


def test_every_hook_is_used_by_a_test() -> None:
    here = Path(__file__).parent
    folders = [
        ROOT / "tests",
        *ROOT.glob("plugins/*/tests"),
        *ROOT.glob("monitors/*/tests"),
        *ROOT.glob("ops/*/tests"),
    ]
    files = [f for folder in folders for f in folder.rglob("*.py") if here not in f.parents]
    text = "\n".join(f.read_text() for f in files)
    unused = [
        name for name in signatures() if not re.search(rf'(def {name}\(|["\']{name}["\'])', text)
    ]
    assert unused == []


def test_help_shows_every_hook() -> None:
    import pydoc

    import ds_core
    from ds_core.plugins.discovery import CORE_HOOKS

    shown = pydoc.plain(pydoc.render_doc(ds_core.plugins.hookspecs))
    assert [name for name in CORE_HOOKS if f"    {name}(" not in shown] == []
