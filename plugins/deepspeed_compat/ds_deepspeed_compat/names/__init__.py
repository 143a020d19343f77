"""The table: every name of DeepSpeed that scripts use, by import path, with what serves it.

Each module of `areas` has one area as ``NAMES``: import paths, separated by spaces -> `Rows`.
constants.json has the values of constants, and imports.json which module of DeepSpeed's
imports which names of another, since scripts take a name also from where it is only imported. From
this alone come the modules that ``import deepspeed`` makes (`ds_deepspeed_compat.finder`) and the
table in docs/migrate.md. It needs the standard library only.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ds_deepspeed_compat.names.areas import (
    checkpoint,
    inference,
    moe,
    ops,
    optimizers,
    pipe,
    runtime,
    tools,
    top,
    utils,
    zero,
)
from ds_deepspeed_compat.names.entry import Name, Rows, State

AREAS: Mapping[str, Mapping[str, Rows]] = {
    "start and configuration": top.NAMES,
    "engine and training": runtime.NAMES,
    "ZeRO": zero.NAMES,
    "pipeline": pipe.NAMES,
    "MoE": moe.NAMES,
    "optimizers and schedules": optimizers.NAMES,
    "operations": ops.NAMES,
    "checkpoints": checkpoint.NAMES,
    "utilities": utils.NAMES,
    "inference, tensor and sequence parallelism": inference.NAMES,
    "launcher, profiling, monitors": tools.NAMES,
}


@functools.cache
def constants() -> Mapping[str, Mapping[str, Any]]:
    """The constants of DeepSpeed 0.19.8 and their values, by the module that has them."""
    rows: Mapping[str, Mapping[str, Any]] = _table("constants.json")
    return rows


@functools.cache
def _imports() -> Mapping[str, Mapping[str, str]]:
    """Module -> the module that it imports names from -> the names, ``name=alias``, or ``*``."""
    rows: Mapping[str, Mapping[str, str]] = _table("imports.json")
    return rows


def _fixed(row: Name, name: str) -> Name:
    """The row with its attribute's name in the target, so that it can stand under another name."""
    return (
        replace(row, target=f"{row.target}:{name}") if row.target and ":" not in row.target else row
    )


def _table(file: str) -> Any:
    return json.loads(Path(__file__).with_name(file).read_text())


@functools.cache
def modules() -> Mapping[str, tuple[Rows, ...]]:
    """Every module and package, by its path -> the rows that it has; packages in between have none
    of their own.
    """
    found: dict[str, tuple[Rows, ...]] = dict.fromkeys(constants(), ())
    # A path may be in several areas: its rows are put together.
    for area in AREAS.values():
        for paths, rows in area.items():
            for path in paths.split():
                found[path] = (*found.get(path, ()), rows)
    for path in list(found):
        # Packages in between have to be importable too.
        while "." in path:
            path = path.rpartition(".")[0]
            found.setdefault(path, ())
    return found


@functools.cache
def names_of(path: str) -> Mapping[str, Name]:
    """The names of one module: those of its rows, the constants that it has, and what it imports
    from the others.
    """
    found: dict[str, Name] = {}
    for origin, words in _imports().get(path, {}).items():
        if origin not in modules():
            continue
        theirs = own_names(origin)
        # As Python's `import *`: all but names with an underscore.
        if "*" in words.split():
            found.update({name: row for name, row in theirs.items() if not name.startswith("_")})
        for name, _, alias in (word.partition("=") for word in words.split()):
            if name in theirs:
                found[alias or name] = _fixed(theirs[name], name)
            elif f"{origin}.{name}" in modules() and f"{path}.{alias or name}" not in modules():
                found[alias or name] = Name(State.WORKS, f"{origin}.{name}:")
    return {**found, **own_names(path)}


@functools.cache
def own_names(path: str) -> Mapping[str, Name]:
    """The names of one module, without what it imports; a row of its own goes before a constant's
    value.
    """
    found = {
        name: Name(State.CONSTANT, value=value) for name, value in constants().get(path, {}).items()
    }
    for rows in modules()[path]:
        for names, value in rows.items():
            row = Name(State.WORKS, value) if isinstance(value, str) else value
            found.update(dict.fromkeys(names.split(), row))
    return found
