"""The result: one frozen `RunConfig`, handed to everything that runs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ds_core.config.redaction import REDACTED, redact
from ds_core.errors import join

if TYPE_CHECKING:
    from pydantic import BaseModel

    from ds_core.config.core import CoreConfig
    from ds_core.errors import Problem

__all__ = ["RunConfig"]


@dataclass(frozen=True, slots=True, repr=False)
class RunConfig:
    """A checked config.

    core: the core's keys. sections: the plugins' sections that the config names. origin: where it came from.
    raw: the data as given; it may hold secrets, so show `redacted()` instead.
    notes: what was accepted and has no effect, or another name now; see `ds_core.config.build`.
    """

    core: CoreConfig
    sections: Mapping[str, BaseModel]
    origin: str
    raw: dict[str, Any]
    notes: tuple[Problem, ...] = ()

    def section(self, name: str) -> BaseModel | None:
        """The parsed section of a plugin; None when the config does not name it."""
        return self.sections.get(name)

    def redacted(self) -> dict[str, Any]:
        """The config as given with every secret replaced by ``***``: fit for logs and checkpoints."""
        shown: dict[str, Any] = self._hide(self.raw, ())
        return shown

    def fingerprint_items(self) -> dict[str, str]:
        """Dotted key -> canonical JSON of its value, secrets as hashes; equal on two ranks if the configs are."""
        return dict(sorted(self._flat(self.raw, "", ())))

    def __repr__(self) -> str:
        names = ", ".join(sorted(self.sections)) or "none"
        return f"RunConfig(origin={self.origin!r}, sections: {names})"

    def _secret(self, keys: tuple[str | int, ...]) -> bool:
        from ds_core.config.keys import is_secret_at

        return is_secret_at(type(self.core), self.sections, keys)

    def _hide(self, value: Any, keys: tuple[str | int, ...]) -> Any:
        if keys and value is not None and self._secret(keys):
            return REDACTED
        if isinstance(value, dict):
            return {k: self._hide(v, (*keys, k)) for k, v in value.items()}
        if isinstance(value, list):
            return [self._hide(v, (*keys, i)) for i, v in enumerate(value)]
        return redact(value)

    def _flat(self, value: Any, path: str, keys: tuple[str | int, ...]) -> Iterator[tuple[str, str]]:
        if keys and value is not None and self._secret(keys):
            digest = hashlib.sha256(_canonical(value).encode("utf-8", "surrogatepass")).hexdigest()
            yield path, f"hidden:{digest[:16]}"
        elif isinstance(value, dict) and value:
            for key, item in value.items():
                yield from self._flat(item, join(path, key), (*keys, key))
        elif isinstance(value, list) and value:
            for index, item in enumerate(value):
                yield from self._flat(item, join(path, index), (*keys, index))
        else:
            yield path, _canonical(redact(value))


def _canonical(value: Any) -> str:
    """JSON with sorted keys, in which 5e8 and 500000000 are one number."""

    def plain(item: Any) -> Any:
        if isinstance(item, dict):
            return {k: plain(v) for k, v in item.items()}
        if isinstance(item, list):
            return [plain(v) for v in item]
        return int(item) if isinstance(item, float) and item.is_integer() else item

    return json.dumps(plain(value), sort_keys=True, separators=(",", ":"))
