"""What plugins answered, and whose fault it is when something that they brought fails (torch-free)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ds_core.answers import WrongAnswer
from ds_core.discovery import Found
from ds_core.entries import Ref, resolve
from ds_core.errors import PluginError

__all__ = ["Answer", "Heard", "Offers", "blaming"]


@contextlib.contextmanager
def blaming(found: Found, what: str, *, passing: tuple[type[BaseException], ...] = ()) -> Iterator[None]:
    """Whatever is raised inside, SystemExit included, becomes a PluginError ``plugin <found> <what>: <cause>``.

    passing: errors that are left as they are.
    """
    try:
        yield
    except BaseException as error:
        if isinstance(error, (KeyboardInterrupt, *passing)):
            raise
        kind = "" if isinstance(error, (WrongAnswer, PluginError)) else f"{type(error).__name__}: "
        raise PluginError(f"plugin {found} {what}: {kind}{error}") from error


@dataclass(frozen=True, slots=True)
class Answer:
    """What one plugin answered to one hook."""

    plugin: Found
    value: Any

    def resolve(self, ref: Ref, what: str) -> Any:
        """Import what a reference of the plugin's names; a failure is an error of the plugin's. what: it is for."""
        with blaming(self.plugin, f"cannot serve {what}"):
            return resolve(ref)


class Offers(Mapping[str, Answer]):
    """Lower-case name -> the offer that serves it. Two offers of one name are an error only when it is looked up."""

    def __init__(self, rows: Mapping[str, list[Answer]], pick: Callable[[str, list[Answer]], Answer]) -> None:
        self._rows, self._pick = rows, pick

    def __getitem__(self, name: str) -> Answer:
        return self._pick(name, self._rows[name])

    def __contains__(self, name: object) -> bool:
        return name in self._rows

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


class Heard:
    """A stream that remembers what is written, and is otherwise the one it was given."""

    def __init__(self, stream: Any) -> None:
        self._stream, self.text = stream, ""

    def write(self, text: str) -> Any:
        """Remember and pass on."""
        self.text += text
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
