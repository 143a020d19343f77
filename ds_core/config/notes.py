"""What a config says that is accepted and yet has no effect, or has another name now: told once, never refused.

A key that is accepted without effect by design is marked where it is declared::

    round_robin_gradients: bool = option(
        False, "Spread the copies of gradients over ranks.", without_effect="they always are"
    )

The mark speaks for every value but the default. What depends on other keys of the section is said by its `remarks`::

    def remarks(self, given):
        if self.stage < 3 and "prefetch_bucket_size" in given:
            yield "prefetch_bucket_size", "has no effect: only stage 3 gathers parameters"

`build_config` collects both for every section (`RunConfig.notes`), `compose` adds those of the chosen optimizer and
schedule (`Composition.notes`). `initialize` logs them as one warning on rank 0; ``dscore config check`` prints them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from ds_core.config.paths import join
from ds_core.config.section import WITHOUT_EFFECT, Section, marks, names_of, old_names
from ds_core.errors import Problem

__all__ = ["notes_on"]


def notes_on(parsed: Any, given: Any, path: str = "") -> Iterator[Problem]:
    """Every note on what was parsed from `given`, with paths that start with `path` and keys as they were written."""
    if isinstance(parsed, (list, tuple)) and isinstance(given, (list, tuple)):
        for index, (item, value) in enumerate(zip(parsed, given, strict=False)):
            yield from notes_on(item, value, join(path, index))
    elif isinstance(parsed, Mapping) and isinstance(given, Mapping):
        for key, item in parsed.items():
            yield from notes_on(item, given.get(key), join(path, key))
    elif isinstance(parsed, BaseModel):
        raw: Mapping[str, Any] = given if isinstance(given, Mapping) else {}
        yield from _on_fields(parsed, raw, path)
        for key, said in parsed.remarks(given) if isinstance(parsed, Section) else ():
            yield Problem(join(path, key) if key else path, said)


def _on_fields(parsed: BaseModel, raw: Mapping[str, Any], path: str) -> Iterator[Problem]:
    for name, field in type(parsed).model_fields.items():
        old = old_names(field)
        used = next((n for n in (*names_of(name, field), *old) if n in raw), None)
        if used is None:
            continue
        where, value = join(path, used), getattr(parsed, name)
        if used in old:
            yield Problem(where, f"is deprecated and was read as {name!r}", "rename it")
        why = marks(field).get(WITHOUT_EFFECT)
        if why is None:
            yield from notes_on(value, raw[used], where)
        elif value != field.get_default(call_default_factory=True):
            yield Problem(where, f"has no effect: {why}")
