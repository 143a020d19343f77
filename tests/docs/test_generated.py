"""What the documentation shows of a command's output is what the command prints.

A ``console`` block that begins with ``$ dscore ...`` holds a command and all that it prints. The
table of layers in architecture.md has import-linter's layers and each module's first line, the one
of names in migrate.md the table of dscore-deepspeed-compat. Those of keys in deepspeed-keys.md and
keys.md are of the config models; packages.md has every distribution with its extras. Between
``<!-- recipe KIND NAME -->`` and its end stands what ``dscore new plugin`` writes: all modules, or
those that are named after it. ``python tests/docs/test_generated.py`` writes all of them anew.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import re
import shlex
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from config_keys import every_key
from played import PAGES as PLAYED

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
LAYERS = re.compile(r"<!-- layers -->\n.*?<!-- /layers -->", re.DOTALL)
NAMES = re.compile(r"<!-- names -->\n.*?<!-- /names -->", re.DOTALL)
EVERY = re.compile(r"<!-- every name -->\n.*?<!-- /every name -->", re.DOTALL)
DEEPSPEED = ROOT / "plugins" / "deepspeed_compat" / "tests" / "deepspeed_0_19_8.json"
KEYS = re.compile(r"<!-- every key -->\n.*?<!-- /every key -->", re.DOTALL)
RECIPE = re.compile(
    r"<!-- recipe ([\w-]+) ([\w-]+)((?: \w+\.py)*) -->\n.*?<!-- /recipe -->", re.DOTALL
)
BLOCK = re.compile(r"```console\n\$ (dscore [^\n]+)\n(.*?)```", re.DOTALL)
PACKAGES = re.compile(r"<!-- packages -->\n.*?<!-- /packages -->", re.DOTALL)
ALL_KEYS = re.compile(r"<!-- all keys -->\n.*?<!-- /all keys -->", re.DOTALL)
PARTS = (BLOCK, LAYERS, NAMES, RECIPE, EVERY, KEYS, PACKAGES, ALL_KEYS)
PAGES = sorted(
    page.relative_to(DOCS).as_posix()
    for folder in (DOCS, DOCS / "plugins")
    for page in folder.glob("*.md")
    if page not in PLAYED and any(part.search(page.read_text()) for part in PARTS)
)


def printed(command: str) -> str:
    """What `command` prints, run in this process."""
    from ds_command_kit.app import make_app

    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        make_app()(shlex.split(command)[1:])
    return said.getvalue()


def summary(module: str) -> str:
    """The first sentence of a module's docstring."""
    file = ROOT / "ds_core" / f"{module}.py"
    tree = ast.parse(
        (file if file.exists() else ROOT / "ds_core" / module / "__init__.py").read_text()
    )
    text = " ".join((ast.get_docstring(tree) or "").split("\n\n")[0].split())
    return re.split(r"(?<=[.;])\s", text)[0].rstrip(".;").replace("|", "\\|")


def _names_in(layer: str) -> list[str]:
    """The modules of one layer, as import-linter writes them."""
    return re.split(r"\s*[|:]\s*", layer)


def layers() -> str:
    """The table of the core's layers."""
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contracts = pyproject["tool"]["importlinter"]["contracts"]
    within = {c["containers"][0].removeprefix("ds_core."): c["layers"] for c in contracts[1:]}
    rows = ["| layer | modules |", "| --- | --- |"]
    for number, layer in enumerate(contracts[0]["layers"], 1):
        lines = []
        for name in _names_in(layer):
            lines.append(f"`{name}`: {summary(name)}")
            inner = [m for below in within.get(name, []) for m in _names_in(below)]
            lines += [f"`{name}/{module}`: {summary(f'{name}/{module}')}" for module in inner]
        rows.append(f"| {number} | " + "<br>".join(lines) + " |")
    return "\n".join(["<!-- layers -->", *rows, "<!-- /layers -->"])


def names() -> str:
    """The tables of DeepSpeed's names, one for each area."""
    from ds_deepspeed_compat.names import AREAS
    from ds_deepspeed_compat.names.entry import Name, State
    from ds_deepspeed_compat.names.members import MEMBERS

    lines = ["<!-- names -->"]
    for area, modules in {**AREAS, "methods and attributes": MEMBERS}.items():
        lines += [
            "",
            f"### {area}",
            "",
            "| module | names | state | what it is, or what to use |",
            "|---|---|---|---|",
        ]
        for paths, rows in modules.items():
            for words, value in rows.items():
                row = value if isinstance(value, Name) else Name(State.WORKS, value)
                what = "; ".join(
                    filter(
                        None, (row.target.rstrip(":") and f"`{row.target.rstrip(':')}`", row.text)
                    )
                )
                cells = [", ".join(f"`{word}`" for word in text.split()) for text in (paths, words)]
                lines.append(f"| {cells[0]} | {cells[1]} | {row.state.value} | {what} |")
    return "\n".join([*lines, "", "<!-- /names -->"])


def recipe(found: re.Match[str]) -> str:
    """The modules of a new plugin, each as a block of Python that begins with its path."""
    from ds_new.kinds import KINDS
    from ds_new.naming import forms_of
    from ds_new.rendering import modules, render

    kind = found[1]
    names = forms_of(found[2])
    wanted = found[3].split()
    files = render(kind, names)
    paths = [
        f"{names.package}/{m}"
        for m in modules(kind)
        if m != "test.py" and (not wanted or m in wanted)
    ]
    blocks = [f"```python\n# {path}\n{files[path]}```" for path in paths]
    head = found[0].partition("\n")[0]
    group = "ds_core.plugins" if KINDS[kind].section else "ds_core.backends"
    entry = f"Entry point, in group `{group}`: `{names.package} = {names.package}.plugin`"
    return "\n\n".join([head, entry, *blocks, "<!-- /recipe -->"])


def every_name() -> str:
    """The table of all public names of DeepSpeed's modules."""
    from ds_deepspeed_compat.names import modules, names_of
    from ds_deepspeed_compat.names.entry import State
    from ds_deepspeed_compat.names.reasons import reason

    lines = [
        "<!-- every name -->",
        "",
        "| module | offered | constants | not offered | instead |",
        "|---|---|---|---|---|",
    ]
    for path, words in json.loads(DEEPSPEED.read_text()).items():
        rows = names_of(path) if path in modules() else {}
        states = {
            name: rows[name].state if name in rows else State.MISSING for name in words.split()
        }
        offered = [name for name, state in states.items() if state in (State.WORKS, State.DIFFERS)]
        constants = [name for name, state in states.items() if state is State.CONSTANT]
        absent = [name for name, state in states.items() if state is State.MISSING]
        why = {name: rows[name].text for name in absent if name in rows}
        rest = [reason(path)] if len(why) < len(absent) else []
        cells = [", ".join(f"`{name}`" for name in names) for names in (offered, constants, absent)]
        lines.append(
            f"| `{path}` | {' | '.join(cells)} | "
            f"{'; '.join(dict.fromkeys([*why.values(), *rest]))} |"
        )
    return "\n".join([*lines, "", "<!-- /every name -->"])


def site_table(part: str) -> str:
    """The tables of packages or of keys, from the makers of the site."""
    sys.path.insert(0, str(DOCS))
    try:
        from _site.tables import key_tables, package_tables
    finally:
        sys.path.remove(str(DOCS))
    text = package_tables(ROOT) if part == "packages" else key_tables()
    return f"<!-- {part} -->\n\n{text}\n\n<!-- /{part} -->"


def generated(text: str) -> str:
    """The page `text` with every generated part as it is now."""
    text = RECIPE.sub(recipe, text)
    text = EVERY.sub(lambda _: every_name(), text)
    text = KEYS.sub(lambda _: every_key(), text)
    text = PACKAGES.sub(lambda _: site_table("packages"), text)
    text = ALL_KEYS.sub(lambda _: site_table("all keys"), text)
    text = NAMES.sub(lambda _: names(), LAYERS.sub(lambda _: layers(), text))
    return BLOCK.sub(lambda found: f"```console\n$ {found[1]}\n{printed(found[1])}```", text)


def test_there_are_generated_pages() -> None:
    assert {
        "architecture.md",
        "choosing-a-stage.md",
        "deepspeed-keys.md",
        "deepspeed-names.md",
        "keys.md",
        "migrate.md",
        "packages.md",
        "plugins/watching.md",
    } <= set(PAGES)


def test_every_kind_has_a_recipe_where_its_readme_points() -> None:
    from ds_new.kinds import KINDS

    for kind, about in KINDS.items():
        text = (DOCS / "plugins" / f"{about.page}.md").read_text()
        part = next((p for p in text.split("\n## ") if p.startswith(f"{about.title}\n")), "")
        assert f"<!-- recipe {kind} " in part, f"docs/plugins/{about.page}.md, {about.title!r}"


def test_the_chooser_has_every_kind() -> None:
    """docs/plugins.md: its hooks, its kit and its page."""
    from ds_new.kinds import KINDS

    text = (DOCS / "plugins.md").read_text()
    rows = dict(re.findall(r"^\| [^|]+ \| `([\w-]+)` (\|.*)$", text, re.MULTILINE))
    assert set(rows) == set(KINDS)
    for kind, about in KINDS.items():
        hooks = re.findall(r"\[`(ds_\w+)`\]", rows[kind])
        assert set(hooks) == set(about.hooks) or (
            kind == "observer" and set(hooks) < set(about.hooks)
        )
        assert f"[{about.title}](plugins/{about.page}.md#" in rows[kind], kind
        (kit,) = re.findall(r"`(\w+Conformance)`", rows[kind])
        part = (DOCS / "plugins" / f"{about.page}.md").read_text().split(f"## {about.title}\n")[1]
        assert f"{kit}`" in part.partition("\n## ")[0], f"{kind}: {kit} is not named on its page"


@pytest.mark.parametrize("page", PAGES)
def test_shown_output_is_current(page: str) -> None:
    text = (DOCS / page).read_text()
    assert text == generated(text), (
        f"docs/{page} is out of date: run python tests/docs/test_generated.py"
    )


if __name__ == "__main__":
    for name in PAGES:
        (DOCS / name).write_text(generated((DOCS / name).read_text()))
