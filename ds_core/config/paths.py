"""How a place in a config is written: ``a.b[0].c`` (torch-free, pydantic-free)."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["join", "path_text"]


def join(path: str, key: str | int) -> str:
    """`path` extended by a key (``a.b``) or a list index (``a[0]``); overlong keys are cut."""
    if isinstance(key, int):
        return f"{path}[{key}]"
    key = key.encode("utf-8", "backslashreplace").decode()
    key = key if len(key) <= 120 else key[:117] + "..."
    return f"{path}.{key}" if path else key


def path_text(keys: Sequence[str | int], root: str = "") -> str:
    """The path of `keys` below `root`."""
    for key in keys:
        root = join(root, key)
    return root
