"""What stands for a documented name that cannot be served: it can be imported, and says why when it is used."""

from __future__ import annotations

from typing import Any, NoReturn

from ds_core.errors import DSError

__all__ = ["NotOfferedError", "stand_in"]


class NotOfferedError(DSError, NotImplementedError):
    """A documented name of DeepSpeed that ds_core does not serve was used."""


class _StandIn(type):
    """The type of all stand-ins. Being classes, they work in `isinstance` (false) and as bases."""

    why: str

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotOfferedError(cls.why)

    def __getattr__(cls, name: str) -> NoReturn:
        if name.startswith("__"):  # what inspect and copy look for
            raise AttributeError(name)
        raise NotOfferedError(cls.why)

    def __instancecheck__(cls, instance: Any) -> bool:
        return False

    def __repr__(cls) -> str:
        return f"<{cls.why}>"


def stand_in(path: str, name: str, why: str) -> type:
    """A class that raises NotOfferedError with `why` when it is called or asked for an attribute."""
    return _StandIn(name, (), {"__module__": path, "__doc__": why, "why": why})
