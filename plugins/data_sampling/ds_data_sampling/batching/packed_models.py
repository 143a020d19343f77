"""Models of transformers on packed rows: they tell samples apart by position_ids, but not where
they keep a cache.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from ds_core.undo import Undo


def leave_out_cache(model: nn.Module, undo: Undo) -> nn.Module:
    """Give a model of transformers ``use_cache=False`` with rows that have position_ids, where the
    caller says nothing.

    With its default, true, it would make a cache for generation, take the rows for continued ones,
    and let attention look from one sample into others (transformers 5.23, `masking_utils`). Other
    models are left as they are.
    """
    if not hasattr(getattr(model, "config", None), "use_cache"):
        return model

    def add(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]] | None:
        return (args, {"use_cache": False, **kwargs}) if "position_ids" in kwargs else None

    undo(model.register_forward_pre_hook(add, with_kwargs=True).remove)
    return model
