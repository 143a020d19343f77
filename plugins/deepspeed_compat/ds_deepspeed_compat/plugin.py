"""Declaration: methods of the engine under DeepSpeed's names (torch-free)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["ds_engine_methods"]


def ds_engine_methods() -> Mapping[str, Callable[..., Any]]:
    """All of `ds_deepspeed_compat.engine_methods`."""
    from ds_deepspeed_compat import engine_methods

    return {name: getattr(engine_methods, name) for name in engine_methods.__all__}
