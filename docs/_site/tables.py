"""The generated parts of docs/packages.md and docs/keys.md, which tests/docs/test_generated.py keeps
current.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from .configuration import _code, _plain, _type_of, about
from .packages import TREE, distributions

HEAD = (
    "| package | what it gives | config sections and commands | in the extras |",
    "| --- | --- | --- | --- |",
)
KEYS = ("| key | type | default | meaning |", "| --- | --- | --- | --- |")


def package_tables(root: Path) -> str:
    """Every distribution with its config sections and extras, kits in a table of their own."""
    catalogue = json.loads((root / "ds_core" / "catalogue.json").read_text("utf-8"))
    offers: dict[str, list[str]] = {}
    for section, owner in sorted(catalogue["sections"].items()):
        offers.setdefault(owner, []).append(f"`{section}`")
    for command, owner in sorted(catalogue["commands"].items()):
        offers.setdefault(owner, []).append(f"`dscore {command}`")
    extras = extras_of(root)
    features, kits = [], []
    for dist, folder in sorted(distributions(root).items()):
        project = (folder / "pyproject.toml").read_text("utf-8")
        link = f"[`{dist}`]({TREE}{folder.relative_to(root).as_posix()})"
        about = re.search(r'^description = "(.+)"', project, re.MULTILINE)
        what = about[1].replace("|", "\\|") if about else ""
        names = ", ".join(offers.get(dist, []))
        brought = ", ".join(f"`{extra}`" for extra in extras.get(dist, []))
        if 'tier = "kit"' in project:
            kits.append(f"| {link} | {what} | {names} | {brought} |")
        else:
            features.append(f"| {link} | {what} | {names} | {brought} |")
    return "\n".join(
        [
            "## Features",
            "",
            *HEAD,
            *features,
            "",
            "## Packages that others build on",
            "",
            "Packages above bring those that they need. Plugins that you write may import them: they are of "
            "the tier *kit*.",
            "",
            *HEAD,
            *kits,
        ]
    )


def extras_of(root: Path) -> dict[str, list[str]]:
    """Distribution -> the extras of dscore-train that bring it, the smallest first."""
    text = (root / "pyproject.toml").read_text("utf-8")
    table = text.partition("[project.optional-dependencies]\n")[2].partition("\n[")[0]
    listed = {
        name: set(re.findall(r'"([\w-]+(?:\[[\w,]+\])?)', items))
        for name, items in re.findall(r"^(\w+) = \[(.*?)^\]", table, re.MULTILINE | re.DOTALL)
    }

    def whole(name: str) -> set[str]:
        """What the extra brings, through other extras too."""
        ours = [re.fullmatch(r"dscore-train\[([\w,]+)\]", item) for item in listed[name]]
        inner = [extra for match in ours if match for extra in match[1].split(",")]
        names = {item.partition("[")[0] for item in listed[name]}
        return names.union(*map(whole, inner))

    found: dict[str, list[str]] = {}
    for name in sorted(listed, key=lambda extra: len(whole(extra))):
        for dist in whole(name):
            found.setdefault(dist, []).append(name)
    return found


def key_tables() -> str:
    """Every key of a config: the core's first, then section by section."""
    from ds_cli.config.command import _installed_models, _named_models

    from ds_core.config.core import CoreConfig

    models = _installed_models()
    parts = ["## Top-level keys", "Package: `dscore-train`.", key_table(CoreConfig, "", models)]
    singles = [name for name in sorted(models) if "root" in models[name][0].model_fields]
    rows = [single_row(name, models[name]) for name in singles]
    parts.append("\n".join([*KEYS, *rows]))
    for name in sorted(set(models) - set(singles)):
        model, owner = models[name]
        parts += [f"## {name}", f"{_plain(about(model))} Package: `{owner.split()[0]}`."]
        parts.append(key_table(model, name, models))
    for kind in ("optimizer", "scheduler"):
        parts += [
            f"## {kind}.params",
            f"By `{kind}.type`; `dscore config explain {kind}.params.lr` explains one of them.",
            named_table(_named_models()[kind]),
        ]
    return "\n\n".join(part for part in parts if part)


def key_table(model: type, prefix: str, models: dict) -> str:
    """The keys of one section."""
    from ds_cli.config.explanation import explain

    from ds_core.config.keys import iter_keys

    rows = {}
    for key in iter_keys(model, prefix):
        ours = all(part.strip("[]*") for part in key.path.split("."))
        if key.spelling != key.name or key.path in rows or not ours:
            continue
        said = explain(key.path, models)
        default = "absent" if said.keys and said.default.startswith(("{", "null")) else said.default
        rows[key.path] = (
            f"| `{key.path}` | {_plain(said.type)} | {_code(default)} | {_plain(said.description)} |"
        )
    return "\n".join([*KEYS, *rows.values()]) if rows else ""


def single_row(name: str, found: tuple[type, str]) -> str:
    """A key whose value is no object."""
    model, owner = found
    default = model.model_fields["root"].default  # type: ignore[attr-defined]
    shown = f"`{json.dumps(default)}`" if isinstance(default, (int, str)) else ""
    text = f"{_plain(about(model))} Package: `{owner.split()[0]}`."
    return f"| `{name}` | {_plain(_type_of(model))} | {shown} | {text} |"


def named_table(named: dict) -> str:
    """The keys of `params`, for every name that `type` can have."""
    from ds_core.config.keys import iter_keys

    rows = ["| type | keys of params | package |", "| --- | --- | --- |"]
    for name, (model, owner) in sorted(named.items()):
        keys = [key.path for key in iter_keys(model) if key.path == key.name]
        listed = ", ".join(f"`{key}`" for key in dict.fromkeys(keys))
        rows.append(f"| `{name}` | {listed} | `{owner.split()[0]}` |")
    return "\n".join(rows)
