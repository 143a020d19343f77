"""Typed storage that plugins hang on a `Context` instead of on other people's objects.

A plugin makes a module-level ``KEY = StashKey[MyState]("ds-mine")`` and reads ``ctx.stash[KEY]``; no two
plugins can collide, and a type checker knows what comes back.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

__all__ = ["Stash", "StashKey"]

T = TypeVar("T")


class StashKey(Generic[T]):
    """An identity for one slot of a `Stash`; `name` is only for error messages."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"StashKey({self.name!r})"


class Stash:
    """A mapping whose values have the type that their key declares."""

    __slots__ = ("_slots",)

    def __init__(self) -> None:
        self._slots: dict[StashKey[Any], Any] = {}

    def __setitem__(self, key: StashKey[T], value: T) -> None:
        self._slots[key] = value

    def __getitem__(self, key: StashKey[T]) -> T:
        try:
            value: T = self._slots[key]
        except KeyError:
            raise KeyError(f"nothing was stashed under {key!r}; its plugin has not run yet") from None
        return value

    def get(self, key: StashKey[T], default: T | None = None) -> T | None:
        """The value, or `default` when nothing was stashed under `key`."""
        return self._slots.get(key, default)

    def pop(self, key: StashKey[T]) -> T | None:
        """Take the value out; None when nothing was stashed under `key`."""
        value: T | None = self._slots.pop(key, None)
        return value

    def __contains__(self, key: StashKey[Any]) -> bool:
        return key in self._slots
