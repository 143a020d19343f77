"""The table: every name of DeepSpeed that scripts use, by import path, with what serves it (standard library only).

Each module of this package holds one area as ``NAMES``: import paths, separated by spaces -> `Rows`. From this alone
come the modules that ``import deepspeed`` makes (`ds_deepspeed_compat.finder`) and the table in docs/migrate.md.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

from ds_deepspeed_compat.names import (
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

__all__ = ["AREAS", "Name", "Rows", "State", "modules", "names_of"]

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
def modules() -> Mapping[str, tuple[Rows, ...]]:
    """Every module and package, by its path -> the rows that it has; packages in between have none of their own."""
    found: dict[str, tuple[Rows, ...]] = {}
    for area in AREAS.values():
        for paths, rows in area.items():
            for path in paths.split():
                found[path] = (*found.get(path, ()), rows)
    for path in list(found):
        while "." in path:
            path = path.rpartition(".")[0]
            found.setdefault(path, ())
    return found


def names_of(path: str) -> dict[str, Name]:
    """The names of one module."""
    return {
        name: Name(State.WORKS, value) if isinstance(value, str) else value
        for rows in modules()[path]
        for names, value in rows.items()
        for name in names.split()
    }
