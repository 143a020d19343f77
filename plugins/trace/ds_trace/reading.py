"""Reading a Chrome trace piece by piece (torch-free): the memory it takes does not grow with the
file.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from ds_core.errors import UsageError

PIECE = 1 << 20
LONGEST = 64 << 20
"""Characters of one event, or of a part of the head."""
_SOLID = re.compile(r"\S")
_DECODER = json.JSONDecoder(strict=False)  # names may hold control characters


def read_trace(path: Path, head: Callable[[str, Any], None]) -> Iterator[dict[str, Any]]:
    """The events of a trace file, ``.json`` or ``.json.gz``.

    head: called with each other key of the file, as read.

    Raises UsageError for a file that is no trace, or that was cut off.
    """
    if not path.is_file():  # a FIFO would be waited for
        raise UsageError(f"{path}: not a file")
    try:
        with (
            gzip.open(path, "rt", encoding="utf-8", errors="replace")
            if path.suffix == ".gz"
            else path.open() as file
        ):
            yield from _Reader(file).document(head)
    # JSONDecodeError is a ValueError
    except (ValueError, EOFError, OSError, RecursionError) as error:
        raise UsageError(f"{path}: not a trace of torch.profiler, or cut off: {error}") from error


class _Reader:
    """Decodes one JSON object from a file, the items of its ``traceEvents`` one by one."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self._text = ""
        self._at = 0

    def _more(self) -> bool:
        """Read on; False at the end of the file."""
        piece = self._file.read(PIECE)
        self._text = self._text[self._at :] + piece
        self._at = 0
        return bool(piece)

    def _next(self) -> str:
        """The next character that is no space, without taking it."""
        while True:
            if found := _SOLID.search(self._text, self._at):
                self._at = found.start()
                return found.group()
            self._at = len(self._text)
            if not self._more():
                raise ValueError("it ends in the middle")

    def _take(self, wanted: str) -> str:
        found = self._next()
        if found not in wanted:
            raise ValueError(f"{found!r} where one of {' '.join(wanted)} should be")
        self._at += 1
        return found

    def _value(self) -> Any:
        """The next value, whole; a number is never the last thing in a trace."""
        self._next()
        while True:
            value = None
            end = len(self._text)
            with contextlib.suppress(json.JSONDecodeError):
                value, end = _DECODER.raw_decode(self._text, self._at)
            if end < len(self._text):  # else it may go on in the next piece
                self._at = end
                return value
            if len(self._text) - self._at > LONGEST:
                raise ValueError(f"a value of more than {LONGEST >> 20} MiB")
            if not self._more():
                raise ValueError("it ends in the middle")

    def document(self, head: Callable[[str, Any], None]) -> Iterator[dict[str, Any]]:
        self._take("{")
        while True:
            key = self._value()
            self._take(":")
            if key == "traceEvents":
                yield from self._items()
            else:
                head(str(key), self._value())
            if self._take(",}") == "}":
                return

    def _items(self) -> Iterator[dict[str, Any]]:
        self._take("[")
        if self._next() == "]":
            self._at += 1
            return
        while True:
            value = self._value()
            if isinstance(value, dict):
                yield value
            if self._take(",]") == "]":
                return
