"""The API reference: public modules of the core and of kits, and the public names of plugins, from
their docstrings.
"""

from __future__ import annotations

import re
from pathlib import Path

from .packages import distributions

MORE = {"dscore-step-log": ["ds_step_log.plugin"]}
"""Modules that users import, of packages whose own names are not all."""

NOT_SHOWN = re.compile(r"\.(plugin|command|__main__|worker|pytest_plugin|hookspecs)$")
"""Hooks have a page of their own."""


def api_pages(root: Path) -> dict[str, str]:
    """A page for each module of the core, for each package with public names, and their list."""
    core = [
        name
        for name in modules(root / "ds_core")
        if name != "ds_core" and not name.endswith(".hookspecs") and has_names(root, name)
    ]
    pages = {f"api/{name}.md": page(name, [name]) for name in core}
    packages = {}
    for dist, folder in sorted(distributions(root).items()):
        home = next(folder.glob("ds_*/__init__.py")).parent
        kit = 'tier = "kit"' in (folder / "pyproject.toml").read_text()
        shown = [
            name
            for name in modules(home)
            if kit and name != home.name and not NOT_SHOWN.search(name)
        ]
        shown = [name for name in shown if has_names(folder, name)] + MORE.get(dist, [])
        if has_names(folder, home.name) or shown:
            names = [home.name, *dict.fromkeys(shown)] if has_names(folder, home.name) else shown
            if kit and home.name != "ds_testing" and shown:
                names = shown if _only_hands_on(folder, home.name) else names
            packages[home.name] = (dist, names)
            pages[f"api/{home.name}.md"] = page(home.name, names, dist)
    return {"api/index.md": index(root, core, packages), **pages}


def modules(package: Path) -> list[str]:
    """The dotted names of all modules below a package, itself first."""
    files = sorted(
        file
        for file in package.rglob("*.py")
        if not re.search(r"/_\w*[a-z]\.py$|/_(?!_)", file.as_posix())
    )
    names = [
        file.relative_to(package.parent).with_suffix("").as_posix().replace("/", ".")
        for file in files
    ]
    return sorted({name.removesuffix(".__init__") for name in names})


def has_names(base: Path, module: str) -> bool:
    """Whether the module has names for others: definitions of its own, or a package's stub."""
    text = source(base, module)
    own = re.search(r"^(async def|def|class) [a-zA-Z]|^[A-Z]\w+ ?[:=]", text, re.MULTILINE)
    hands_on = "__all__" in text or "names_on_first_use(__name__)" in text
    return hands_on or own is not None


def source(base: Path, module: str) -> str:
    """The text of a module below `base`."""
    path = base / module.replace(".", "/")
    file = path.with_suffix(".py")
    return (file if file.exists() else path / "__init__.py").read_text()


def _only_hands_on(base: Path, module: str) -> bool:
    """Whether the package has no definition of its own, so that its names stand on the pages of its
    modules.
    """
    return not re.search(r"^(def|class) ", source(base, module), re.MULTILINE)


def page(title: str, names: list[str], dist: str = "") -> str:
    """One page with the members of these modules."""
    parts = [f"# {title}"]
    if dist:
        parts.append(f"Package: [{dist}](../packages/{dist}.md).")
    for name in names:
        parts += [f"## {name}"] if len(names) > 1 else []
        parts.append(f"```{{eval-rst}}\n.. automodule:: {name}\n```")
    return "\n\n".join(parts) + "\n"


def index(root: Path, core: list[str], packages: dict[str, tuple[str, list[str]]]) -> str:
    """The list of all pages, and of the names that ``import ds_core`` gives."""
    import ds_core

    homes = {}
    for name in ds_core.__getattr__("__all__"):
        home = getattr(getattr(ds_core, name), "__module__", "ds_core.plugins.hookspecs")
        homes[name] = home if home in core else "ds_core.plugins.hookspecs"
    at = {"ds_core.plugins.hookspecs": "../hooks"}
    names = "\n".join(
        f"| [`ds_core.{name}`]({at.get(home, home)}.md) | `{home}` |"
        for name, home in homes.items()
    )
    rows = "\n".join(f"| [`{name}`]({name}.md) | {summary(root, name)} |" for name in core)
    others = "\n".join(
        f"| [`{name}`]({name}.md) | `{dist}` |" for name, (dist, _) in packages.items()
    )
    toc = "\n".join([*core, *packages])
    return f"""# API reference

Made from docstrings. Names that begin with an underscore are private, and what is not on these pages
may change (`docs/stability.md`).

## What `import ds_core` gives

| name | defined in |
| --- | --- |
{names}

## Modules of the core

| module | what it is |
| --- | --- |
{rows}

## Packages

| package | distribution |
| --- | --- |
{others}

```{{toctree}}
:hidden:

{toc}
```
"""


def summary(root: Path, module: str) -> str:
    """The first sentence of a module's docstring."""
    found = re.match(r'"""(.+?)(?:\n\n|""")', source(root, module), re.DOTALL)
    text = " ".join(found[1].split()) if found else ""
    return re.split(r"(?<=[.;])\s", text)[0].rstrip(".;").replace("|", "\\|").replace("``", "`")
