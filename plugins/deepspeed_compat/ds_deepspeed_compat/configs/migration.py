"""``dscore config migrate``: what becomes of each key of a DeepSpeed config, and the config as
ds_core wants it.

There is no table here. What is wrong, old or without effect is what the check of a config says;
current names are those of the sections as they were parsed.
"""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from ds_command_kit.config_code import Imports, read_to_look_at
from ds_command_kit.show import CommandError
from pydantic import BaseModel

from ds_core.config import CORE_KEYS, read_config
from ds_core.config.section import names_of, old_names
from ds_core.errors import ConfigError, Problem, join
from ds_core.setup.compose import Composition, compose


@dataclass(frozen=True)
class Migration:
    """A config as ds_core wants it, and what became of the old keys.

    renamed, idle: notes on keys that have another name now, and on those that have no effect and
        are left out.
    remarks: what else there is to say.
    lost: what cannot be had.
    to_install: what a package must be installed for; its keys are kept.
    autos: what a front-end fills in.
    """

    config: dict[str, Any]
    renamed: tuple[Problem, ...]
    idle: tuple[Problem, ...]
    remarks: tuple[Problem, ...]
    lost: tuple[Problem, ...]
    to_install: tuple[Problem, ...]
    autos: tuple[str, ...]


def migrate(
    file: Annotated[
        Path, typer.Argument(metavar="CONFIG", help="The config, as DeepSpeed reads it.")
    ],
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="Write the new config here (JSON)."),
    ] = None,
    imports: Imports = False,
) -> None:
    """Say what becomes of each key of a DeepSpeed config, and write the config as ds_core wants it.

    Exit codes:
      0: every key has its place in the new config
      1: something of the old config is not provided, or the config cannot be read

    Examples:
      dscore config migrate ds_config.json
      dscore config migrate ds_config.json -o new_config.json
    """
    if output is not None and output.exists():
        raise CommandError(f"{output} exists; name a new file")
    source = read_to_look_at(file, imports)
    found = migrated(source)
    kept = [key for key in source.raw if key in found.config]
    typer.echo(f"stays: {', '.join(kept) or 'nothing'}")
    _say("has another name now, and was renamed", [str(p) for p in found.renamed])
    _say("has no effect, and was left out", [str(p) for p in found.idle])
    _say("stays, with a remark", [str(p) for p in found.remarks])
    _say(
        '"auto", which the Trainer, Accelerate or another frontend fills in',
        [", ".join(found.autos)],
    )
    _say("needs a package", [str(p) for p in found.to_install])
    _say("does not work here, and was left out", [_why(p) for p in found.lost])
    if output is not None:
        output.write_text(json.dumps(found.config, indent=2, ensure_ascii=False) + "\n", "utf-8")
        shutil.copymode(file, output)  # it may hold secrets
        typer.echo(f"written: {output}")
    if found.lost:
        raise typer.Exit(1)


_REMOVAL = re.compile(r"^((remove it|leave it out|switch it off)(, or |$))+")


def _why(problem: Problem) -> str:
    """What is wrong, without a fix that asks for what was done already: the key is left out."""
    return str(replace(problem, fix=_REMOVAL.sub("", problem.fix)))


def _say(title: str, lines: list[str]) -> None:
    if any(lines):
        typer.echo(f"{title}:")
        for line in lines:
            typer.echo(f"  {line}")


def migrated(source: Any) -> Migration:
    """The migration of a config: a dict, or the path of a file.

    Raises ConfigError when it cannot be read at all.
    """
    raw = read_config(source).raw
    # What is wrong is taken out, and the rest checked again: a mistake may hide others.
    left: dict[str, Any] = copy.deepcopy(raw)
    lost: list[Problem] = []
    to_install: list[Problem] = []
    chosen: Composition | None = None
    while chosen is None:
        try:
            chosen = compose(left, fill_later=True)
        except ConfigError as error:
            before = len(json.dumps(left))
            for problem in error.problems:
                # Nothing of a section can be checked without its package: all of it is set aside.
                absent = "which is not installed" in problem.message
                _remove(left, problem.path.partition(".")[0] if absent else problem.path)
                seen = to_install if absent else lost
                # later ones only follow from it
                if all(problem.path != earlier.path for earlier in seen):
                    seen.append(problem)
            if len(json.dumps(left)) == before:
                raise  # something is missing that only the user can write
    # The check knows the current names; sections that wait for a package stay as they were written.
    config = _core_and_sections(chosen, left)
    for problem in to_install:
        top = problem.path.partition(".")[0]
        config[top] = raw[top]
    renamed = []
    idle = []
    remarks = []
    for note in chosen.notes:
        # Its path is of an old name, which the new config does not have any more.
        if not _has(config, note.path) or "deprecated" in note.message:
            renamed.append(Problem(note.path, note.message.partition(";")[0]))
        elif note.message.startswith("has no effect"):
            idle.append(note)
            _remove(config, note.path)
        else:
            remarks.append(note)
    return Migration(
        config,
        tuple(renamed),
        tuple(idle),
        tuple(remarks),
        tuple(lost),
        tuple(to_install),
        chosen.config.autos,
    )


# -- the current names -----------------------------------------------------------------------------


def _core_and_sections(chosen: Composition, raw: Mapping[str, Any]) -> dict[str, Any]:
    """`raw` with the current name of every key."""
    core = chosen.config.core
    others = {k: v for k, v in raw.items() if k not in CORE_KEYS}
    config = _section(core, {k: v for k, v in raw.items() if k in CORE_KEYS})
    config |= {key: _renamed(chosen.config.section(key), value) for key, value in others.items()}
    order = {key: at for at, key in enumerate(raw)}
    return dict(sorted(config.items(), key=lambda item: order.get(item[0], len(order))))


def _renamed(parsed: Any, given: Any) -> Any:
    """`given` with the current name of each key; values stay as written.

    parsed: the section that it became.
    """
    if isinstance(parsed, BaseModel) and isinstance(given, Mapping):
        return _section(parsed, given)
    if (
        isinstance(parsed, BaseModel)
        and type(given) is bool
        and type(parsed).model_fields.keys() != {"root"}
    ):
        return _data(parsed)  # an old spelling of a whole section
    if isinstance(parsed, (list, tuple)) and isinstance(given, list) and len(parsed) == len(given):
        return [_renamed(item, value) for item, value in zip(parsed, given, strict=True)]
    if isinstance(parsed, Mapping) and isinstance(given, Mapping):
        return {key: _renamed(parsed.get(key), value) for key, value in given.items()}
    return given


def _section(parsed: BaseModel, given: Mapping[str, Any]) -> dict[str, Any]:
    fields = type(parsed).model_fields
    names = {spelling: name for name, field in fields.items() for spelling in names_of(name, field)}
    old = {spelling: name for name, field in fields.items() for spelling in old_names(field)}
    written: dict[str, Any] = {}
    done: set[str] = set()
    for key, value in given.items():
        name = names.get(key) or old.get(key)
        if name is None or value == "auto":  # an open object, or what is filled in later
            written[key] = value
        elif name in parsed.model_fields_set:
            written[key if key in names else name] = _renamed(getattr(parsed, name), value)
            done.add(name)
    return written | {
        n: _data(getattr(parsed, n)) for n in fields if n in parsed.model_fields_set - done
    }


def _data(value: Any) -> Any:
    return (
        value.model_dump(mode="json", exclude_unset=True) if isinstance(value, BaseModel) else value
    )


# -- paths -----------------------------------------------------------------------------------------


def _steps(data: Any, path: str, at: str = "") -> list[tuple[Any, Any]] | None:
    """(container, key) from the top down to `path`, or to the last of its parts that is there; None
    for no part.
    """
    items: Any = (
        data.items()
        if isinstance(data, dict)
        else enumerate(data)
        if isinstance(data, list)
        else ()
    )
    for key, value in items:
        where = join(at, key)
        if path == where or path.startswith((f"{where}.", f"{where}[")):
            return [(data, key), *(_steps(value, path, where) or [])]
    return None


def _has(data: Any, path: str) -> bool:
    steps = _steps(data, path)
    at = ""
    for _, key in steps or ():
        at = join(at, key)
    return at == path


def _remove(data: dict[str, Any], path: str) -> None:
    """Take out `path`, or what is nearest above it; containers that it leaves empty go too."""
    removed = False
    for container, key in reversed(_steps(data, path) or []):
        if not removed or container[key] in ({}, []):
            del container[key]
            removed = True
