"""Attention modules: into how many heads their projections divide, and what a rank with some heads must know."""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["head_units", "localize"]

HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
WIDTHS = ("split_size", "all_head_size", "inner_dim")
_SIGNS = (*HEADS, *KV_HEADS, "head_dim", "num_key_value_groups")


def head_units(module: nn.Module) -> int | None:
    """The number of parts into which all widths of an attention's projections divide: its key-value heads.

    None: the module is no attention.
    """
    if not any(isinstance(getattr(module, name, None), int) for name in _SIGNS):
        return None
    heads = _number(module, HEADS)
    return _number(module, KV_HEADS) or heads if heads else None


def localize(module: nn.Module, units: int, mine: int) -> None:
    """Let an attention know that it has `mine` of `units` parts of its heads."""
    for name in (*HEADS, *KV_HEADS, *WIDTHS):
        if isinstance(module.__dict__.get(name), int):
            setattr(module, name, module.__dict__[name] * mine // units)


def _number(module: nn.Module, names: tuple[str, ...]) -> int | None:
    """The first of the attributes that is there, of the module or of its config."""
    places: tuple[Any, ...] = (module, getattr(module, "config", None))
    for place in places:
        for name in names:
            if isinstance(value := getattr(place, name, None), int) and value > 0:
                return value
    return None
