"""Writes ``ds_core/engine/methods.pyi``: what type checkers know of the methods that packages of this
repository add to the engine (`ds_engine_methods`).

Run by ``make catalogue``. Types that a package defines are written out where they are aliases, and
are Any where they are classes, so that the stub imports only torch, the core and the standard
library.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import json
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

from distributions import ROOT

FILE = ROOT / "ds_core" / "engine" / "methods.pyi"
HEAD = '''"""The methods that packages of this repository add to the engine, for type checkers.

Written by ``make catalogue`` from the functions themselves. A method works where its package is
installed.
"""
'''
OPEN = ("ds_core", "torch")
"""Packages that the stub imports, besides the standard library."""
KINDS = {
    "standard library": lambda module: module.partition(".")[0] in sys.stdlib_module_names,
    "torch": lambda module: module.startswith("torch"),
    "the core": lambda module: module.startswith("ds_core"),
}


class _Text:
    """An annotation or default that is shown as it is written."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


class _Names(ast.NodeTransformer):
    """Names of one module's annotations, as the stub can write them; notes what it is to import."""

    def __init__(self, module: ModuleType, imports: dict[str, str]) -> None:
        self.module = module
        self.imports = imports
        self.tree = ast.parse(inspect.getsource(module))

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        """A name in quotes."""
        if isinstance(node.value, str):
            return self.visit(ast.parse(node.value, mode="eval").body)  # type: ignore[no-any-return]
        return node

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """A name: an alias is replaced by what it stands for."""
        if hasattr(builtins, node.id):
            return node
        for each in ast.walk(self.tree):
            if isinstance(each, ast.ImportFrom) and each.module:
                for alias in each.names:
                    if (alias.asname or alias.name) == node.id:
                        return self._imported(each.module, alias.name)
            if isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == node.id:
                return self.visit(ast.parse(ast.unparse(each.value), mode="eval").body)  # type: ignore[no-any-return]
        return self._imported("typing", "Any")

    def _imported(self, module: str, name: str) -> ast.expr:
        package = module.partition(".")[0]
        if package in OPEN or package in sys.stdlib_module_names:
            self.imports[name] = module
            return ast.Name(name)
        other = _Names(importlib.import_module(module), self.imports)
        return other.visit_Name(ast.Name(name))


def method(name: str, dist: str, function: Any, imports: dict[str, str]) -> str:
    """The stub of one method."""
    names = _Names(inspect.getmodule(function) or builtins, imports)

    def shown(annotation: Any) -> _Text:
        tree = ast.parse(str(annotation), mode="eval").body
        return _Text(ast.unparse(ast.fix_missing_locations(names.visit(tree))))

    signature = inspect.signature(function)
    own, *others = signature.parameters.values()
    me = own.replace(name="self", annotation=inspect.Parameter.empty)
    # `empty` is a class, and an enum may be a str.
    plain = (bool, int, float, str, type(None), type)
    rest = [
        p.replace(
            annotation=shown(p.annotation),
            default=p.default if type(p.default) in plain else _Text("..."),
        )
        for p in others
    ]
    text = str(
        signature.replace(
            parameters=[me, *rest], return_annotation=shown(signature.return_annotation)
        )
    )
    about = " ".join((inspect.getdoc(function) or name).partition("\n\n")[0].split())
    doc = textwrap.fill(f'"""{about.rstrip(".")}. From {dist}."""', 92)
    return f"    def {name}{text}:\n" + textwrap.indent(doc, " " * 8)


def made() -> str:
    """The file as it should be."""
    from ds_core.plugins import Plugins

    ours = json.loads((ROOT / "ds_core" / "catalogue.json").read_text())["folders"]
    plugins = Plugins()
    plugins.probe_all()
    given: dict[str, tuple[str, Any]] = {}
    for answer in plugins.offers("ds_engine_methods"):
        if answer.plugin.dist in ours:
            for name, reference in answer.value.items():
                given[name] = answer.plugin.dist, answer.resolve(reference, name)
    imports: dict[str, str] = {}
    methods = [method(name, *given[name], imports) for name in sorted(given)]
    modules: dict[str, list[str]] = {}
    for name, module in imports.items():
        modules.setdefault(module, []).append(name)
    parts = {
        kind: [f"from {m} import {', '.join(sorted(modules[m]))}" for m in sorted(modules) if of(m)]
        for kind, of in KINDS.items()
    }
    text = "\n\n".join("\n".join(lines) for lines in parts.values() if lines)
    text = f"{HEAD}\n{text}\n\nclass PluginMethods:\n" + "\n\n".join(methods) + "\n"
    ruff = Path(sys.executable).with_name("ruff")
    command = [str(ruff), "format", "--stdin-filename", str(FILE), "-"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=True, cwd=ROOT)
    return done.stdout


if __name__ == "__main__":
    FILE.write_text(made())
