"""Writes ``ds_core/catalogue.json`` from the entry points of every distribution and from
``documented.json``.

Run by ``make catalogue``. Declaration modules are imported from their folders; nothing needs to be
installed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from distributions import DISTRIBUTIONS, ROOT

FILE = ROOT / "ds_core" / "catalogue.json"
# sections and names of the documents, written by hand
DOCUMENTED = Path(__file__).with_name("documented.json")
HOOKS = {
    "ds_optimizers": "optimizers",
    "ds_schedulers": "schedulers",
    "ds_state_stores": "state_stores",
    "ds_checkpoint_storages": "checkpoint_storages",
    "ds_checkpoint_formats": "checkpoint_formats",
    "ds_collectives": "collectives",
    "ds_launchers": "launchers",
    "ds_commands": "commands",
    "ds_run_options": "run_options",
    "ds_config_formats": "config_formats",
    "ds_compile_passes": "compile_passes",
    "ds_pipeline_schedules": "pipeline_schedules",
}
DRIVERS = ("ds_checkpointer", "ds_mesh")
"""Hooks that an installed backend answers without being named; see `Plugins.driver`."""


def projects() -> dict[str, tuple[Path, dict[str, Any]]]:
    """Distribution -> its folder and its table ``project``, by name."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    read = [
        (folder, tomllib.loads((folder / "pyproject.toml").read_text())["project"])
        for folder in DISTRIBUTIONS
    ]
    return {
        project["name"]: (folder, project)
        for folder, project in sorted(read, key=lambda row: row[1]["name"])
    }


def described(name: str, row: dict[str, Any], sections: dict[str, str]) -> dict[str, Any]:
    """The row of a documented section; why it is not offered, where its owner is not in this
    repository.
    """
    if name in sections or "why" in row:
        return row
    return {**row, "owner": "", "why": f"{row['owner']} is not in this version"}


def offered(plugins: Any, folders: dict[str, str]) -> dict[str, dict[str, Any]]:
    """What the distributions of `folders` offer by name, by kind."""
    catalogue: dict[str, dict[str, Any]] = {}
    for hook, kind in HOOKS.items():
        answers = [a for a in plugins.offers(hook) if a.plugin.dist in folders]
        # A dotted path works without whoever offers it, too.
        catalogue[kind] = {
            name: a.plugin.dist for a in answers for name in a.value if "." not in name.lstrip(".")
        }
    kernels = [
        (e, a.plugin.dist)
        for a in plugins.offers("ds_kernels")
        for e in a.value
        if a.plugin.dist in folders
    ]
    catalogue["kernels"] = {
        e.op: dist for e, dist in sorted(kernels, key=lambda row: -row[0].priority)
    }
    starts = [
        (a.value, a.plugin.dist)
        for a in plugins.offers("ds_rendezvous")
        if a.plugin.dist in folders
    ]
    catalogue["launch_variables"] = {
        name: dist for entry, dist in starts if entry for name in entry.variables
    }
    rows = [
        (hook, report.found)
        for report in plugins.reports()
        for hook in report.hooks
        if hook in DRIVERS
    ]
    # A backend comes last, and counts: it serves without being named in the config.
    rows.sort(key=lambda row: row[1].group == "ds_core.backends")
    catalogue["drivers"] = {hook: found.dist for hook, found in rows if found.dist in folders}
    methods = plugins.merged("ds_engine_methods", installed=True)
    catalogue["engine_methods"] = {
        name: a.plugin.dist for name, a in methods.items() if a.plugin.dist in folders
    }
    return catalogue


def made() -> str:
    """The file as it should be."""
    from ds_core.plugins import Plugins
    from ds_core.plugins.discovery import BACKENDS, KIT_HOOKS, SECTIONS, Found

    found: list[Found] = []
    folders: dict[str, str] = {}
    sections: dict[str, str] = {}
    hooks: dict[str, str] = {}
    for dist, (folder, project) in projects().items():
        folders[dist] = folder.relative_to(ROOT).as_posix()
        if str(folder) not in sys.path:
            sys.path.append(str(folder))
        for name in project.get("entry-points", {}).get(KIT_HOOKS, ()):
            hooks[name] = dist
        for group in (SECTIONS, BACKENDS):
            for name, module in project.get("entry-points", {}).get(group, {}).items():
                found.append(Found(name, group, module, dist, project["version"]))
                if group == SECTIONS:
                    sections[name] = dist
    plugins = Plugins(found=found)
    broken = [r.why for r in plugins.examine() if r.why]
    assert not broken, broken
    listed = json.loads(DOCUMENTED.read_text())
    catalogue: dict[str, dict[str, Any]] = {
        "folders": folders,
        "sections": sections,
        "hooks": hooks,
    }
    catalogue["engine"] = listed["engine"]
    catalogue["documented"] = {
        name: described(name, row, sections) for name, row in listed["sections"].items()
    }
    catalogue |= offered(plugins, folders)
    return (
        json.dumps({kind: dict(sorted(rows.items())) for kind, rows in catalogue.items()}, indent=1)
        + "\n"
    )


if __name__ == "__main__":
    FILE.write_text(made())
