"""The words of ``dscore run`` that start a trial: the script's config found in them, flags and
config put into them.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ds_command_kit.show import CommandError

CONFIG_FLAGS = (
    "--deepspeed_config",
    "--deepspeed",
    "--ds_config",
    "--deepspeed-config",
    "--ds-config",
)
"""Flags by which scripts take a config: DeepSpeed's own, the Trainer's, and what is usual."""

_FORMATS = (".json", ".hjson", ".yaml", ".yml", ".toml")


@dataclass(frozen=True)
class Launch:
    """``dscore run OPTIONS SCRIPT ARGUMENTS``.

    config: the file among the arguments, "" where there is none.

    nproc: processes per host, None where the launcher counts accelerators.
    nodes: hosts.
    is_module, is_command: what `script` is, if no file of Python's.
    """

    options: tuple[str, ...]
    script: str
    arguments: tuple[str, ...]
    config: str = ""
    nproc: int | None = None
    nodes: int = 1
    is_module: bool = False
    is_command: bool = False

    @property
    def world(self) -> int | None:
        """The number of ranks, as far as the words tell it."""
        return None if self.nproc is None else self.nproc * self.nodes

    def words(self) -> list[str]:
        """What follows ``dscore run``."""
        return [*self.options, self.script, *self.arguments]

    def command(self) -> list[str]:
        """What a trial runs: nothing is started again when it fails, and no terminal is needed."""
        # Options come before "--", if there is one.
        return [
            sys.executable,
            "-m",
            "ds_cli",
            "run",
            "--max-restarts",
            "0",
            *self._once(),
            self.script,
            *self.arguments,
        ]

    def _once(self) -> list[str]:
        kept = []
        skip = False
        for word in self.options:
            if skip or word.startswith(("--max-restarts=", "--max_restarts=")):
                skip = False
            elif word in ("--max-restarts", "--max_restarts"):
                skip = True
            else:
                kept.append(word)
        return kept

    def with_flags(self, setting: Mapping[str, Any], mappings: Mapping[str, str]) -> Launch:
        """With the script's flags that say the same as keys of the config."""
        arguments = list(self.arguments)
        for key, flag in mappings.items():
            if (value := at(setting, key)) is not None:
                _put(arguments, flag, value if isinstance(value, str) else json.dumps(value))
        return replace(self, arguments=tuple(arguments))

    def with_config(self, path: str) -> Launch:
        """With another config file in the place of `config`."""
        if not self.config:
            return self
        words = tuple(
            word.replace(self.config, path)
            if word == self.config or word.endswith("=" + self.config)
            else word
            for word in self.arguments
        )
        return replace(self, arguments=words, config=path)

    def final(self, config: Path) -> list[str]:
        """The whole command that runs with the config in a file; a script that names its own gets
        it by a variable.
        """
        words = ["dscore", "run", *self.with_config(str(config)).words()]
        return words if self.config else ["env", f"DS_CONFIG_OVERRIDES={config}", *words]


def parse_words(words: Sequence[str]) -> Launch:
    """What ``dscore run`` makes of `words`.

    ``--set`` is left out of them: it is in DS_CONFIG_OVERRIDES from now on, where each trial has its
    own settings after it. Raises CommandError as it would, and for what a trial cannot be.
    """
    from ds_command_kit.app import find_command
    from ds_command_kit.launch import parse_nodes, parse_nproc
    from ds_command_kit.overrides import read_settings, variables_for

    command = find_command("run")
    given = command.make_context("run", list(words)).params
    arguments = tuple(given["arguments"] or ())
    head = list(words[: len(words) - len(arguments)])
    script = head.pop()
    if given["show"] or given.get("autotuning"):
        raise CommandError("--show and --autotuning do not go together with tuning; leave them out")
    if given["settings"]:
        os.environ.update(variables_for(read_settings(given["settings"])))
        head = _without_set(head)
    low, high = parse_nodes(given["nnodes"])
    if low != high:
        raise CommandError(
            f"--nnodes {given['nnodes']} is elastic; tune with the number of hosts that will train"
        )
    hosts = given["hostfile"] or given["nnodes"]
    nproc = parse_nproc(given["nproc"])
    if given["world"] is not None and not (hosts and not high):
        nproc = given["world"] // (high or 1)
    return Launch(
        tuple(head),
        script,
        arguments,
        _config_in(arguments),
        None if hosts and not high else nproc,
        high or 1,
        given["module"],
        given["no_python"],
    )


def _without_set(options: Sequence[str]) -> list[str]:
    kept = []
    words = iter(options)
    for word in words:
        if word == "--set":
            next(words)
        elif not word.startswith("--set="):
            kept.append(word)
    return kept


def _config_in(arguments: Sequence[str]) -> str:
    """The config file that the script is given; "" where none is."""
    for index, word in enumerate(arguments):
        flag, equals, value = word.partition("=")
        if flag not in CONFIG_FLAGS:
            continue
        if not equals:
            value = arguments[index + 1] if index + 1 < len(arguments) else ""
        if (
            value
            and not value.startswith("-")
            and (os.path.isfile(value) or value.endswith(_FORMATS))
        ):
            return value
    return ""


def _put(arguments: list[str], flag: str, value: str) -> None:
    """Set `flag` where it stands, or add it."""
    for index, word in enumerate(arguments):
        if word == flag and index + 1 < len(arguments):
            arguments[index + 1] = value
            return
        if word.startswith(flag + "="):
            arguments[index] = f"{flag}={value}"
            return
    arguments += [flag, value]


def at(config: Mapping[str, Any], key: str) -> Any:
    """The value of a dotted key in a nested config; None where it is not there."""
    value: Any = config
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return None
        value = value[part]
    return value
