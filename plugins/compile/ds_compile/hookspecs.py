"""The hook of dscore-compile (torch-free)."""

from __future__ import annotations

from collections.abc import Mapping

from ds_core import entries
from ds_core.plugins import checks


@checks.gives(checks.named("builtins:str"))
def ds_compile_passes() -> Mapping[str, entries.Ref]:  # type: ignore[empty-body]
    """Driver, by the name in ``compile.passes``: reference to a function ``ctx -> pass``; see
    `ds_compile.passes`.

    Passes run with ``compile.deepcompile: true``, when the script calls ``engine.compile()``.
    """
