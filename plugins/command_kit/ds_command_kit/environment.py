"""Changes to this process's environment that are undone (torch-free)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping


def import_torch() -> None:
    """With its warnings in C++ off, for this process alone: a store that has gone is told of by
    us."""
    with environment({"TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR")}):
        import torch  # noqa: F401


@contextlib.contextmanager
def environment(changes: Mapping[str, str | None]) -> Iterator[None]:
    """`os.environ` with `changes` (None removes), put back afterwards; torch's launcher copies it
    for each process.
    """
    before = {name: os.environ.get(name) for name in changes}
    try:
        _set(changes)
        yield
    finally:
        _set(before)


def _set(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
