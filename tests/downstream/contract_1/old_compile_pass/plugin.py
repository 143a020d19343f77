"""The declaration of old-compile-pass: a pass over compiled graphs (torch-free)."""

from __future__ import annotations

from collections.abc import Mapping


def ds_compile_passes() -> Mapping[str, str]:
    """By the name in ``compile.passes``: a function of the context that gives the pass."""
    return {"old_compile_pass": "old_compile_pass.drops:make_pass"}
