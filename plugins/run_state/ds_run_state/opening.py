"""Opening files from untrusted sources: through no link unasked, never anything but a regular file
(torch-free).

What counts is what was opened: its kind and size are asked of the descriptor, so they cannot change
in between. A FIFO does not block, and a file above its size limit is not read.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

from ds_core.errors import CheckpointError


def open_plain(path: Path, *, links: bool = False) -> tuple[int, int]:
    """(a descriptor for reading, the size in bytes); FileNotFoundError when there is none, else
    CheckpointError.

    links: whether `path` may be one, as the files of a hub's cache are.
    """
    follow = 0 if links else os.O_NOFOLLOW
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | follow | os.O_NONBLOCK)
    except FileNotFoundError:
        raise
    except OSError as error:
        why = "it is a link" if error.errno == errno.ELOOP else error.strerror or str(error)
        raise CheckpointError(f"{path} cannot be read: {why}") from error
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode):
        return descriptor, status.st_size
    os.close(descriptor)
    raise CheckpointError(f"{path} cannot be read: it is not a regular file")


def read_small(path: Path, most: int, *, links: bool = False) -> bytes:
    """A file's bytes; CheckpointError when it has more than `most`.

    links: see `open_plain`.
    """
    descriptor, size = open_plain(path, links=links)
    with open(descriptor, "rb") as file:
        if size > most:
            raise CheckpointError(
                f"{path} has {size} bytes, where {most} are the most that such a file can have"
            )
        try:
            return file.read(most)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error


def parse_json(text: bytes, most: int) -> Any:
    """The JSON value in `text`; ValueError when it is none, or one of about more than `most`
    values.

    A list of empty lists takes twenty times the memory of its text, so values are counted before
    any is made.
    """
    if (count := text.count(b",") + text.count(b"[") + text.count(b"{")) > most:
        raise ValueError(f"it has about {count} values, where {most} are the most")
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error


def read_start(path: Path, count: int) -> bytes:
    """The first `count` bytes of a file."""
    with open(open_plain(path)[0], "rb") as file:
        return file.read(count)
