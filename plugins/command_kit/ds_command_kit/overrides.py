"""``--set KEY=VALUE``: keys of the config from the command line, typed by its schema (torch-free).

They reach the processes by DS_CONFIG_OVERRIDES, so it does not matter which config the script gives
to ``initialize``. A key that is unknown, or a value that the key does not take, is refused before
any process starts; what depends on other keys is found by the run.
"""

from __future__ import annotations

import base64
import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ds_command_kit.environment import environment
from ds_command_kit.show import CommandError

VARIABLE = "DS_CONFIG_OVERRIDES"
MOST = 100_000
"""Characters of the variable: Linux starts no process with one of more than 128 KiB."""
_KEY = re.compile(r"[A-Za-z_][\w-]*(\.[\w-]+)*", re.ASCII)


def read_settings(texts: Sequence[str]) -> dict[str, Any]:
    """Dotted key -> value; of a key that is given twice the last value.

    A value is JSON where the key takes what it means, else text. Raises CommandError with
    everything that is wrong.
    """
    found: dict[str, Any] = {}
    wrong: list[str] = []
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or len(key) > 200 or not _KEY.fullmatch(key):
            # The text may hold a secret.
            shown = json.dumps(key[:60])
            wrong.append(f"{shown} is not KEY=VALUE, as in zero_optimization.stage=3")
            continue
        candidates = _candidates(value)
        problems = [_problem(key, candidate) for candidate in candidates]
        if "" in problems:
            found.pop(key, None)
            found[key] = candidates[problems.index("")]
        else:
            wrong.append(problems[0])
    if wrong:
        raise CommandError("\n".join(f"--set: {line}" for line in wrong))
    return found


def variables_for(settings: Mapping[str, Any]) -> dict[str, str]:
    """The variable for the processes: what it holds already, and `settings`.

    Raises ConfigError where it holds no config, and CommandError where it would be too long.
    """
    # In order: the last one wins.
    kept = {key: value for key, value in held().items() if key not in settings}
    text = encode({**kept, **settings})
    if len(text) > MOST:
        raise CommandError("--set: the values are too long; write them into the config file")
    return {VARIABLE: text}


def held() -> dict[str, Any]:
    """What the variable holds; raises ConfigError where that is no config."""
    from ds_core.config import read_config

    return read_config(os.environ.get(VARIABLE) or {}).raw


def encode(settings: Mapping[str, Any]) -> str:
    """Settings as the variable takes them."""
    return base64.urlsafe_b64encode(json.dumps(settings).encode()).decode()


def describe(settings: Mapping[str, Any]) -> str:
    """The settings for a log, without secrets."""
    from ds_core.config.keys import secret_names
    from ds_core.config.redaction import redact

    names = secret_names(model for key in settings for model in _models(key))
    rows = []
    for key, value in settings.items():
        shown = redact(_nested(key, value), names)
        for name in key.split("."):
            shown = shown[name] if isinstance(shown, dict) else shown
        text = json.dumps(shown)
        rows.append(f"{key} = {text if len(text) <= 200 else text[:197] + '...'}")
    return ", ".join(rows)


def _candidates(value: str) -> list[Any]:
    """What `value` may mean: as JSON, and as text."""
    try:
        data = json.loads(value)
    except (ValueError, RecursionError):
        return [value]
    finite = not isinstance(data, float) or math.isfinite(data)
    # The text of a list, of an object or of a string in quotes is meant as what it is.
    return [data, value] if isinstance(data, (int, float, type(None))) and finite else [data]


def _nested(key: str, value: Any) -> Any:
    """The config that has the dotted key alone."""
    for name in reversed(key.split(".")):
        value = {name: value}
    return value


def _problem(key: str, value: Any) -> str:
    """What is wrong with the key or its value; "" where nothing is."""
    from ds_core.config import load_config
    from ds_core.errors import ConfigError, PluginError, Problem

    problems: list[Problem] = []
    try:
        with environment({VARIABLE: None}):
            load_config(_nested(key, value), problems=problems)
    except ConfigError as error:
        problems = [*error.problems]
    except PluginError as error:
        # A module of plugins.load may be importable by the script alone.
        return "" if key.startswith("plugins") else f"{key}: {error}"
    for problem in problems:
        at = problem.path.partition("[")[0]
        # Of a section around the key nothing else is known.
        around = f"{key}.".startswith(f"{at}.") and problem.message.startswith(_OF_SECTIONS)
        if f"{at}.".startswith(f"{key}.") or around or not at:
            return str(problem)
    return ""


_OF_SECTIONS = (
    "must be ",
    "unknown key",
    "section ",
    "this key is documented",
    "the plugin that owns",
)


def _models(key: str) -> Iterable[Any]:
    from ds_core.plugins import Plugins

    return [model for model, _ in Plugins().models([key.partition(".")[0]]).values()]
