"""Who imports what: the parts that must stay light stay light, and every module stands by
itself."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from distributions import DISTRIBUTIONS, PACKAGES, ROOT

sys.path.insert(0, str(Path(__file__).parent))

from graph import parse

from ds_core.naming import PREFIX

CORE = ROOT / "ds_core"


def is_kit(distribution: Path) -> bool:
    """Whether others may import it: its pyproject says ``[tool.ds_core] tier = "kit"``."""
    text = (distribution / "pyproject.toml").read_text()
    return re.search(r'^\[tool\.ds_core\]\ntier = "kit"$', text, re.MULTILINE) is not None


# These describe, choose and check; the command line and every declaration module stand on them.
TORCH_FREE = (
    "ds_core",
    "ds_core.setup.builtin",
    "ds_cli.plugin",
    "ds_command_kit.hookspecs",
    "ds_command_kit.hosts",
    "ds_command_kit.launch",
    "ds_command_kit.run_options",
    "ds_core.setup.compose",
    "ds_core.entries",
    "ds_core.errors",
    "ds_monitor_kit",
    "ds_core.plugins.hookspecs",
    "ds_core.kernels",
    "ds_kernel_kit.portions",
    "ds_core.mesh",
    "ds_core.setup.optim",
    "ds_core.plugins",
    "ds_core.process",
    "ds_core.context",
)


def modules(package: Path) -> Iterator[tuple[str, Path]]:
    """(dotted name, file) of every module of a package folder."""
    for file in sorted(package.rglob("*.py")):
        parts = file.relative_to(package.parent).with_suffix("").parts
        if parts[-1] != "__main__":
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), file


CONFIG_MODULES = tuple(name for name, _ in modules(CORE) if name.startswith("ds_core.config"))
DECLARATIONS = tuple(
    f"{package.name}.plugin" for package in PACKAGES if (package / "plugin.py").exists()
)
KITS = {d.name for dist in DISTRIBUTIONS if is_kit(dist) for d in dist.glob("ds_*")}
EVERYTHING = tuple(entry for package in PACKAGES for entry in modules(package))


def python(code: str, *arguments: str) -> str:
    """What `code` prints in a fresh interpreter that sees every package of this checkout."""
    path = os.pathsep.join(str(p.parent) for p in PACKAGES)
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_ds_core_loads_nothing_but_itself() -> None:
    code = """
import sys
before = set(sys.modules)
import ds_core
new = {name.partition(".")[0] for name in set(sys.modules) - before}
print(sorted(new - set(sys.stdlib_module_names)))
"""
    assert python(code).strip() == "['ds_core']"


@pytest.mark.parametrize(
    "names", [TORCH_FREE, CONFIG_MODULES, DECLARATIONS], ids=["core", "config", "declarations"]
)
def test_torch_free_modules_load_no_torch(names: tuple[str, ...]) -> None:
    code = """
import importlib, json, sys
guilty = []
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
    if "torch" in sys.modules or "numpy" in sys.modules:
        guilty.append(name)
        break
print(guilty)
"""
    assert python(code, json.dumps(names)).strip() == "[]"


def test_asking_what_is_offered_loads_no_torch() -> None:
    """Loading every plugin and reading all its offers is what `dscore plugins` and a config check
    do.
    """
    code = """
import sys
from ds_core.plugins import Plugins
plugins = Plugins()
plugins.probe_all()
plugins.offers("ds_config")
plugins.offers("ds_commands")
for hook in ("ds_accelerators", "ds_kernels", "ds_optimizers", "ds_schedulers", "ds_launchers"):
    assert plugins.offers(hook), hook
print("torch" in sys.modules)
"""
    assert python(code).strip() == "False"


@pytest.mark.slow
def test_every_module_imports_alone_with_warnings_as_errors() -> None:
    """One process imports the foundations and forks for each module, so each is the first of ours
    to be imported.
    """
    code = """
import importlib, json, os, sys, traceback, warnings
for name in ("torch", "torch.distributed", "pydantic", "pluggy", "importlib_metadata", "typer", "rich", "pytest"):
    importlib.import_module(name)
failed = []
for name in json.loads(sys.argv[1]):
    sys.stderr.flush()
    child = os.fork()
    if not child:
        try:
            warnings.simplefilter("error")
            importlib.import_module(name)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        failed.append(name)
assert not failed, failed
"""
    python(code, json.dumps([name for name, _ in EVERYTHING]))


# -- by reading the sources ------------------------------------------------------------------------


def imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything a module imports, also inside functions and under
    TYPE_CHECKING.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"


RUNS_OTHERS = {"ds_command_kit", "ds_testing"}
"""Kits that call a plugin's code by themselves (commands, checks of kernels): that code runs only
where they are.
"""


def breaches(name: str, tree: ast.AST, own: str, ours: set[str], allowed: set[str]) -> list[str]:
    """Imports that a module may not have: of a package that is not `allowed`, or a private name of
    the core.
    """
    found = []
    for line, target in imported(tree):
        top = target.partition(".")[0]
        private = any(p.startswith("_") and not p.startswith("__") for p in target.split(".")[1:])
        if top in ours - allowed - {own} or (top == "ds_core" != own and private):
            found.append(f"{name}:{line} imports {target}")
    return found


def declared(distribution: Path) -> set[str]:
    """The packages of ours that a distribution depends on."""
    text = (distribution / "pyproject.toml").read_text()
    listed = re.search(r"^dependencies = \[(.*?)\]$", text, re.MULTILINE | re.DOTALL)
    assert listed is not None
    found = re.findall(rf'"{PREFIX}([\w-]+)', listed[1])
    return {"ds_" + name.replace("-", "_") for name in found}


@pytest.mark.parametrize("package", PACKAGES, ids=lambda p: p.name)
def test_core_kits_plugins(package: Path) -> None:
    """The core imports neither kits nor plugins; kits and plugins import the core and the kits that
    they declare.
    """
    ours = {p.name for p in PACKAGES}
    allowed = (
        set()
        if package == CORE
        else {"ds_core"} | (KITS & (declared(package.parent) | RUNS_OTHERS))
    )
    found = []
    for name, file in modules(package):
        found += breaches(name, parse(file.read_text()), package.name, ours, allowed)
    assert found == []


def test_kits_depend_on_each_other_in_one_direction() -> None:
    folders = {d.name: dist for dist in DISTRIBUTIONS for d in dist.glob("ds_*") if d.name in KITS}
    waiting = {name: (declared(dist) & KITS) - {name} for name, dist in folders.items()}
    while ready := [name for name, needs in waiting.items() if not needs]:
        waiting = {name: needs - set(ready) for name, needs in waiting.items() if name not in ready}
    assert waiting == {}


def test_the_import_rule_sees_breaches() -> None:
    bad = ast.parse(
        "import ds_b.plugin\ndef f():\n    from ds_core._private import thing\n"
        "from ds_core import errors\nimport ds_kit"
    )
    ours = {"ds_a", "ds_b", "ds_core", "ds_kit"}
    plugin = ["ds_a:1 imports ds_b.plugin", "ds_a:3 imports ds_core._private.thing"]
    assert sorted(breaches("ds_a", bad, "ds_a", ours, {"ds_core", "ds_kit"})) == plugin
    assert sorted(breaches("ds_a", bad, "ds_a", ours, {"ds_core"})) == sorted(
        [*plugin, "ds_a:5 imports ds_kit"]
    )
    core = ["ds_core.x:1 imports ds_b.plugin", "ds_core.x:5 imports ds_kit"]
    assert sorted(breaches("ds_core.x", bad, "ds_core", ours, set())) == core


FORBIDDEN_CALLS = {
    "torch.save": "pickles; write safetensors and JSON",
    "torch.load": "unpickles; read safetensors and JSON",
    "os.system": "goes through a shell; use subprocess with an argument list",
}
PICKLING = ("_object", "_object_list")  # torch.distributed's collectives of Python objects


def dotted(node: ast.expr) -> str:
    """``a.b.c`` of a name or an attribute of one; "" for anything else, which no rule names."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def misdeeds(name: str, tree: ast.AST) -> list[str]:
    """Pickle, shells and patches of torch in one module."""
    found = []
    for line, target in imported(tree):
        if target.partition(".")[0] in ("pickle", "marshal", "shelve", "dill", "cloudpickle"):
            found.append(f"{name}:{line} imports {target}")
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = dotted(node.func)
            data_only = called == "torch.load" and any(
                ast.unparse(k) == "weights_only=True" for k in node.keywords
            )
            # other programs' files, by torch's restricted loader
            if called in FORBIDDEN_CALLS and not data_only:
                found.append(f"{name}:{node.lineno} {called} {FORBIDDEN_CALLS[called]}")
            if called.startswith(("dist.", "torch.distributed.")) and called.endswith(PICKLING):
                found.append(f"{name}:{node.lineno} {called} pickles")
            if any(k.arg == "shell" and ast.unparse(k.value) != "False" for k in node.keywords):
                found.append(f"{name}:{node.lineno} {called} with shell")
            if called == "setattr" and node.args and dotted(node.args[0]).startswith("torch"):
                found.append(f"{name}:{node.lineno} patches torch")
        changed = [node.target] if isinstance(node, (ast.AugAssign, ast.AnnAssign)) else []
        for target in node.targets if isinstance(node, ast.Assign) else changed:
            text = ast.unparse(target) if isinstance(target, ast.Attribute) else ""
            if text.startswith("torch.") and not text.startswith("torch.backends."):
                found.append(f"{name}:{node.lineno} patches {text}")
    return found


# DeepSpeed and torch.distributed.checkpoint load nothing but pickles, so what is exported for them is
# written as such: written, never read. Each module's imports and calls that do so.
WRITES_FOR_OTHERS = {
    "ds_checkpoint_deepspeed.saving": ["imports pickle", "torch.save"],
    "ds_checkpoint_dcp.writing": ["imports pickle", "torch.save"],
}


def test_no_pickle_no_shell_no_patching_of_torch() -> None:
    found = []
    for name, file in EVERYTHING:
        found += misdeeds(name, parse(file.read_text()))
    for module, allowed in WRITES_FOR_OTHERS.items():
        rows = [row.split() for row in found if row.startswith(f"{module}:")]
        done = [" ".join(r[1:3]) if r[1] == "imports" else r[1] for r in rows]
        assert sorted(done) == sorted(allowed)
    assert [row for row in found if row.partition(":")[0] not in WRITES_FOR_OTHERS] == []


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "torch.save(x, f)",
        "torch.load(f)",
        "torch.load(f, weights_only=False)",
        "dist.all_gather_object(a, b)",
        "subprocess.run('ls', shell=True)",
        "torch.nn.Linear.forward = f",
        "setattr(torch.optim, 'Adam', f)",
    ],
)
def test_the_rule_sees_misdeeds(code: str) -> None:
    assert len(misdeeds("m", ast.parse(code))) == 1


def test_every_package_is_typed() -> None:
    assert [p.name for p in PACKAGES if not (p / "py.typed").exists()] == []
