"""The hook reference: every hook of ds_core/plugins/hookspecs.py, with who calls it, its kit and a whole
example.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

HEAD = """# Hook reference

A plugin is a module of these functions. Of a *driver* one answer is chosen, of a *hook* every answer is used, and an
*observer* is a hook that is told what happens. A function may leave out arguments that it does not need. Whole plugins
with their files: [Writing a plugin](../plugins.md). The conformance kits are in
[dscore-testing](api/ds_testing.md).
"""

KITS = {
    "ds_config_formats": "ConfigFormatConformance",
    "ds_accelerators": "AcceleratorConformance",
    "ds_rendezvous": "RendezvousConformance",
    "ds_kernels": "KernelConformance",
    "ds_collectives": "CollectivesConformance",
    "ds_optimizers": "OptimizerConformance",
    "ds_schedulers": "SchedulerConformance",
    "ds_state_stores": "StateStoreConformance",
    "ds_monitors": "MonitorConformance",
    "ds_interceptors": "InterceptorConformance",
    "ds_transforms": "TransformConformance",
    "ds_partitioner": "PartitionerConformance",
    "ds_runner": "RunnerConformance",
    "ds_checkpointer": "CheckpointerConformance",
    "ds_checkpoint_formats": "CheckpointFormatConformance",
    "ds_precision": "PrecisionConformance",
    "ds_loader": "LoaderConformance",
    "ds_gradients": "GradientsConformance",
    "ds_metrics": "ObserverConformance",
    "ds_compile_passes": "CompilePassConformance",
    "ds_launchers": "LauncherConformance",
    "ds_pipeline_schedules": "PipelineScheduleConformance",
    "ds_engine_methods": "EngineMethodsConformance",
    "ds_mesh_axes": "MeshAxisConformance",
    "ds_param_axes": "MeshAxisConformance",
    "ds_mesh": "MeshConformance",
    "ds_commands": "CommandConformance",
    "ds_check": "CheckConformance",
    "ds_charts": "ChartConformance",
    "ds_memory": "MemoryConformance",
}
"""The kit of each hook that has one of its own; observers have `ObserverConformance`, the rest
`PluginConformance`.
"""
OWN_KITS = {"CheckpointFormatConformance", "PipelineScheduleConformance"}
"""Kits that come with the hook's package, not with dscore-testing."""


def hook_pages(root: Path) -> dict[str, str]:
    """The page of all hooks."""
    files = [
        root / "ds_core/plugins/hookspecs.py",
        *sorted(root.glob("plugins/*/ds_*/hookspecs.py")),
    ]
    homes = {
        node.name: file
        for file in files
        for node in ast.parse(file.read_text()).body
        if _is_hook(node)
    }
    hooks = [node for file in files for node in ast.parse(file.read_text()).body if _is_hook(node)]
    recipes = _recipes(root)
    callers = _uses(root, "ds_core")
    users = _implementations(root)
    rows = []
    parts = []
    for hook in hooks:
        name = hook.name
        doc = ast.get_docstring(hook) or ""
        head = " ".join(doc.split("\n\n")[0].split())
        kind, _, text = head.partition(":")
        text = text or head.removeprefix("Driver, ")
        kit = KITS.get(name, "ObserverConformance" if "observer" in kind else "PluginConformance")
        first = re.split(r"(?<=[.;])\s", text)[0].rstrip(".;").replace("``", "`").strip()
        rows.append(f"| [`{name}`](#{name}) | {re.split('[,.]', kind)[0].lower()} | {first} |")
        where = homes[name].parent.name if kit in OWN_KITS else "ds_testing"
        facts = [f"- Kit: [`{kit}`](api/{where}.md)"]
        if name in callers:
            facts.append("- Called by: " + ", ".join(f"`{module}`" for module in callers[name]))
        if name in recipes:
            title, page = recipes[name]
            facts.append(f"- Example: [{title}](../{page})")
        if name in users:
            facts.append(
                "- Used by: " + ", ".join(f"[{dist}](packages/{dist}.md)" for dist in users[name])
            )
        module = _module(homes[name].relative_to(root))
        function = f"```{{eval-rst}}\n.. autofunction:: {module}.{name}\n```"
        parts.append("\n\n".join([f"## {name}", function, "\n".join(facts)]))
    table = "\n".join(["| hook | kind | what for |", "| --- | --- | --- |", *rows])
    return {"hooks.md": "\n\n".join([HEAD + "\n" + table, *parts]) + "\n"}


def _module(file: Path) -> str:
    """The name by which a file of a package is imported."""
    parts = file.with_suffix("").parts
    first = next(place for place, part in enumerate(parts) if part.startswith("ds_"))
    return ".".join(parts[first:])


def _is_hook(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef) and node.name.startswith("ds_")


def _recipes(root: Path) -> dict[str, tuple[str, str]]:
    """Hook -> title and page of the first recipe that defines it, in the order of docs/plugins.md."""
    found: dict[str, tuple[str, str]] = {}
    chooser = (root / "docs/plugins.md").read_text()
    for name in dict.fromkeys(re.findall(r"\(plugins/([\w-]+)\.md#", chooser)):
        file = root / "docs/plugins" / f"{name}.md"
        for section in file.read_text().split("\n## ")[1:]:
            title = section.partition("\n")[0]
            slug = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
            for hook in re.findall(r"^def (ds_\w+)\(", section, re.MULTILINE):
                found.setdefault(hook, (title, f"plugins/{file.name}#{slug}"))
    return found


def _uses(root: Path, package: str) -> dict[str, list[str]]:
    """Hook -> the modules that ask it by name."""
    found: dict[str, list[str]] = {}
    for file in sorted((root / package).rglob("*.py")):
        if file.name in ("hookspecs.py", "builtin.py"):
            continue
        module = (
            file.relative_to(root)
            .with_suffix("")
            .as_posix()
            .replace("/", ".")
            .removesuffix(".__init__")
        )
        for name in sorted(set(re.findall(r'"(ds_\w+)"', file.read_text()))):
            found.setdefault(name, []).append(module)
    return found


def _implementations(root: Path) -> dict[str, list[str]]:
    """Hook -> the distributions that define it in a declaration module."""
    found: dict[str, list[str]] = {}
    for folder in sorted(file.parent for file in root.glob("*/*/pyproject.toml")):
        names = set()
        for file in folder.glob("ds_*/**/*.py"):
            names |= set(re.findall(r"^def (ds_\w+)\(", file.read_text(), re.MULTILINE))
        dist = re.search(r'^name = "(.+)"', (folder / "pyproject.toml").read_text(), re.MULTILINE)
        for name in sorted(names):
            if dist is not None and dist[1] != "dscore-testing":
                found.setdefault(name, []).append(dist[1])
    return found
