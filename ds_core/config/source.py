"""Reading a config: dict, file or base64 text -> plain data, checked for what no schema can say
(torch-free).

Repeated keys, NaN and Infinity, keys that are not text, endless nesting and cycles are found here,
each with the full path of the key. Parsers of other formats are imported when a file of that format
is read.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

from ds_core.errors import ConfigError, Problem, join

MAX_BYTES = 16 * 1024 * 1024
MAX_DEPTH = 64
MAX_VALUES = 200_000


@dataclass(frozen=True, slots=True, repr=False)
class ConfigSource:
    """Plain data and where it came from.

    raw: only dict, list, str, int, float, bool and None; may hold secrets.
    problems: of values that no config can hold, in whose place `raw` has null.
    """

    raw: dict[str, Any]
    origin: str
    problems: tuple[Problem, ...] = ()

    def overridden(self) -> ConfigSource:
        """This with the values of DS_CONFIG_OVERRIDES.

        A top-level key there replaces that of the config, and a dotted one, such as
        ``zero_optimization.stage``, replaces that key alone.

        Raises ConfigError where the variable holds no config.
        """
        more = read_config(os.environ.get("DS_CONFIG_OVERRIDES") or {}).raw
        raw = {**self.raw}
        for path, value in more.items():
            *outer, last = path.split(".")
            at = raw
            for name in outer:
                inner = at.get(name)
                at[name] = at = {**inner} if isinstance(inner, dict) else {}
            at[last] = value
        origin = self.origin + " and DS_CONFIG_OVERRIDES" * bool(more)
        return ConfigSource(raw, origin, self.problems)

    def __repr__(self) -> str:
        return f"ConfigSource(origin={self.origin!r}, keys={sorted(self.raw)})"


def read_config(source: Any, *, in_part: bool = False) -> ConfigSource:
    """Read a config and copy it; nothing of the caller's is kept or changed.

    source: a mapping; the path of a .json file, or of one whose format a plugin reads (anything
        else is read as JSON, then hjson where that is installed); or JSON text in URL-safe base64.
    in_part: single values that are wrong are `problems` of the source, and no error.

    Raises ConfigError for everything that is not a config.
    """
    found = _read(source)
    if found.problems and not in_part:
        raise ConfigError(found.problems, found.origin)
    return found


def _read(source: Any) -> ConfigSource:
    if isinstance(source, ConfigSource):
        return source
    if isinstance(source, Mapping):
        return _checked("config dict", lambda: source)
    if isinstance(source, os.PathLike):
        source = os.fspath(source)
    if not isinstance(source, str):
        raise ConfigError(
            "a config must be a dict, the path of a file or base64 text, not "
            f"{type(source).__name__}"
        )
    if not source.strip():
        raise ConfigError("the config is an empty string; give a dict or the path of a file")
    if os.path.exists(source):
        return _checked(
            _printable(source),
            lambda: _parse(_file_text(source), os.path.splitext(source)[1].lower()),
        )
    if (text := _base64_text(source)) is not None:
        return _checked("base64 config", lambda: _parse(text, ".json"))
    if source.lstrip().startswith(("{", "[")):
        raise ConfigError(
            "this is the text of a config, not a path; parse it with json.loads, or write it to a "
            "file"
        )
    shown = source if len(source) <= 200 else source[:197] + "..."
    raise ConfigError(
        f"no such file: {_printable(shown)!r} (the current directory is "
        f"{_printable(os.getcwd())!r})"
    )


def _base64_text(source: str) -> str | None:
    """The JSON text in `source`, or None when it is not base64 of an object."""
    try:
        text = base64.urlsafe_b64decode(source.strip() + "=" * (-len(source.strip()) % 4)).decode(
            "utf-8-sig"
        )
    except (binascii.Error, ValueError):
        return None
    return text if text.lstrip().startswith("{") else None


def _file_text(path: str) -> str:
    if os.path.isdir(path):
        raise Unreadable("this is a directory, not a config file; name the file in it")
    try:
        with open(path, "rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise Unreadable(f"cannot be read: {error.strerror or error}") from None
    if len(data) > MAX_BYTES:
        raise Unreadable(f"the file is larger than {MAX_BYTES >> 20} MiB; is it a config?")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        at = (
            f"byte 0x{data[error.start]:02x} at offset {error.start} (line "
            f"{data.count(10, 0, error.start) + 1})"
        )
        raise Unreadable(f"the file is not UTF-8: {at}; save it as UTF-8") from None


def _parse(text: str, suffix: str) -> Any:
    """The data in `text`, by its format; JSON may be hjson, which the documents allow in a .json
    file.
    """
    if not text.strip():
        raise Unreadable("the config is empty; an empty config is written {}")
    if suffix not in ("", ".json") and (parse := format_parser(suffix)) is not None:
        return parse(text)
    try:
        return parse_json(text)
    except Unreadable as error:
        # The first error is the one to show: a file of this name is meant to be JSON.
        with contextlib.suppress(Unreadable):
            if (parse := format_parser(".hjson")) is not None:
                return parse(text)
        raise error from None


def _checked(origin: str, read: Callable[[], Any]) -> ConfigSource:
    """What `read` gives as plain data.

    Raises ConfigError, which names `origin`, for all that is wrong with it.
    """
    copier = _Copier()
    try:
        data = read()
        if not isinstance(data, Mapping):
            raise Unreadable(
                f"the top level must be an object of keys and values, not {_kind(data)}"
            )
        raw = copier.copy(data, "", 0)
    except Unreadable as error:
        raise ConfigError([Problem(error.path, error.message)], origin) from None
    except RecursionError:
        raise ConfigError(_TOO_DEEP, origin) from None
    return ConfigSource(raw, origin, tuple(copier.problems))


# -- from whatever the parser or the caller gave to plain data -------------------------------------

_TOO_DEEP = f"the config is nested more than {MAX_DEPTH} levels deep, or holds itself"


@dataclass(slots=True)
class _Copier:
    """Copies to plain data; collects problems and stops at too many levels or values."""

    problems: list[Problem] = field(default_factory=list)
    values: int = 0

    def copy(self, value: Any, path: str, depth: int) -> Any:
        self.values += 1
        if self.values > MAX_VALUES:
            raise Unreadable(f"the config holds more than {MAX_VALUES} values")
        if depth > MAX_DEPTH:
            raise Unreadable(_TOO_DEEP, path if len(path) <= 60 else path[:57] + "...")
        if isinstance(value, Mapping):
            return self._mapping(value, path, depth)
        if isinstance(value, (list, tuple)):
            return [self.copy(v, f"{path}[{i}]", depth + 1) for i, v in enumerate(value)]
        return self._scalar(value, path)

    def _mapping(self, value: Mapping[Any, Any], path: str, depth: int) -> dict[str, Any]:
        for key in value.repeated if isinstance(value, Pairs) else ():
            self._wrong(
                join(path, key), f"the key {_printable(key)!r} is repeated", "keep one of them"
            )
        copied = {}
        for key, item in value.items():
            if not isinstance(key, str):
                fix = (
                    f'write it in quotes: "{key}"'
                    if isinstance(key, (int, float, bool)) or key is None
                    else ""
                )
                self._wrong(
                    join(path, repr(key)[:60]), f"a key must be text, not {_kind(key)}", fix
                )
                continue
            # A subclass of str, as an enum's member, becomes plain text.
            copied[str.__str__(key)] = self.copy(item, join(path, key), depth + 1)
        return copied

    def _scalar(self, value: Any, path: str) -> Any:
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            return str.__str__(value)
        if isinstance(value, os.PathLike):
            return os.fspath(value)
        if isinstance(value, Integral):
            return int(value)
        if isinstance(value, Real):
            number = float(value)
            if math.isfinite(number):
                return number
            from ds_core.catalogue import documented

            if number > 0 and documented().get(path, {}).get("infinity_is_null"):
                return None
            shown = "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"
            self._wrong(
                path, f"{shown} is not a number that a config can hold", "write a finite number"
            )
            return None
        kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
        fix = "use text, numbers, true/false, lists and dicts"
        self._wrong(path, f"a value of type {kind} cannot stand in a config", fix)
        return None

    def _wrong(self, path: str, message: str, fix: str) -> None:
        self.problems.append(Problem(path, message, fix))


def _kind(value: Any) -> str:
    names = {
        type(None): "null",
        bool: "true or false",
        int: "a number",
        float: "a number",
        str: "text",
        list: "a list",
    }
    return names.get(type(value), type(value).__name__)


def _printable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


# -- text -> data: JSON here, other formats by the hook `ds_config_formats` ------------------------


class Unreadable(Exception):
    """The text is not of its format.

    path: the key that is at fault, when it is known.
    """

    def __init__(self, message: str, path: str = "", line: int = 0, column: int = 0) -> None:
        where = f"line {line}, column {column}: " if line else ""
        self.message = f"{where}{message}"
        self.path = path
        super().__init__(self.message)


class Pairs(dict[str, Any]):
    """A dict that remembers which keys came more than once."""

    repeated: tuple[str, ...] = ()


def to_pairs(items: list[tuple[str, Any]]) -> Pairs:
    """A dict of `items`, which remembers the keys that come more than once."""
    found = Pairs(items)
    if len(found) < len(items):
        names = [k for k, _ in items]
        found.repeated = tuple(dict.fromkeys(k for k in names if names.count(k) > 1))
    return found


def parse_json(text: str) -> Any:
    """JSON, with NaN and Infinity let through for the caller to name."""
    try:
        return json.loads(text, object_pairs_hook=to_pairs)
    except json.JSONDecodeError as error:
        raise Unreadable(
            f"not JSON: {error.msg[:1].lower()}{error.msg[1:]}", "", error.lineno, error.colno
        ) from None
    except ValueError as error:  # a number of thousands of digits
        raise Unreadable(f"not JSON: {error}") from None


def format_parser(suffix: str) -> Callable[[str], Any] | None:
    """The parser that an installed plugin offers for files that end in `suffix`; None when none
    does.

    Raises Unreadable where a package of this repository would.
    """
    from ds_core.plugins import Plugins

    offers = Plugins().named("ds_config_formats", "config_formats")
    if suffix in offers:
        answer = offers[suffix]
        parser: Callable[[str], Any] = answer.resolve(
            answer.value, f"config files that end in {suffix}"
        )
        return parser
    from ds_core.catalogue import missing, offered_by

    if offered_by("config_formats", suffix) is not None:
        raise Unreadable(str(missing("config_formats", suffix)))
    return None
