"""Attention modules: how many groups of heads their weights divide into, and what a rank's share of them changes.

Weights of attention are divided by whole groups: the query heads that share a key and value head, and that head. A
model that takes the number of heads from its weights (transformers' ``view(..., -1, head_dim)``) needs nothing else; of
the others, attributes that count heads become this rank's.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

__all__ = ["Heads", "HeadsConfig", "heads_of", "keep_heads"]

QUERY_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "num_attention_heads_per_partition")
KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "num_multi_query_groups_per_partition")
SIZES = ("head_dim", "attention_head_size", "hidden_size_per_attention_head")
WIDTHS = ("split_size", "all_head_size", "inner_dim", "projection_size", "hidden_size_per_partition")
_SIGNS = (*QUERY_HEADS, *KEY_HEADS, *SIZES, "num_key_value_groups")


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads of an attention: of queries, of keys, and their size (0: it does not say)."""

    queries: int
    keys: int
    size: int

    @property
    def units(self) -> int:
        """The number of parts into which the widths of all its projections divide."""
        return self.keys

    @property
    def fused(self) -> tuple[int, int, int]:
        """The widths of queries, keys and values."""
        return self.queries * self.size, self.keys * self.size, self.keys * self.size


def heads_of(module: nn.Module) -> Heads | None:
    """The heads of `module`; None where it is no attention, or one whose keys do not divide its queries."""
    if not any(isinstance(getattr(module, name, None), int) for name in _SIGNS):
        return None
    config = getattr(module, "config", None)
    queries = _count(module, QUERY_HEADS) or _count(config, QUERY_HEADS)
    if not queries:
        return None
    groups = _count(module, ("num_key_value_groups",))
    keys = queries // groups if groups else _count(module, KEY_HEADS)
    if not keys:
        multi_query = getattr(module, "multi_query", False) and not getattr(module, "new_decoder_architecture", False)
        keys = 1 if multi_query else _count(config, KEY_HEADS) or queries
    size = _count(module, SIZES) or _count(config, SIZES)
    return Heads(queries, keys, size) if queries % keys == 0 else None


def _count(source: object, names: tuple[str, ...]) -> int:
    """The first of these attributes that is a number; 0: none."""
    return next((v for n in names if isinstance(v := getattr(source, n, None), int) and v > 0), 0)


def keep_heads(module: Any, heads: Heads, first: int, count: int) -> None:
    """Let `module`, whose weights were cut, work on `count` groups of heads from `first` on."""
    each = heads.queries // heads.keys
    for part in (module, *module.children()):
        for names, whole, mine in (
            (QUERY_HEADS, heads.queries, count * each),
            (KEY_HEADS, heads.keys, count),
            (WIDTHS, heads.queries * heads.size, count * each * heads.size),
        ):
            for name in names:
                if vars(part).get(name) == whole:
                    setattr(part, name, mine)
    config = getattr(module, "config", None)
    if config is not None and not isinstance(config, HeadsConfig):
        local = {n: count * each for n in QUERY_HEADS if getattr(config, n, None) == heads.queries}
        local |= {n: count for n in KEY_HEADS if getattr(config, n, None) == heads.keys}
        module.config = HeadsConfig(config, local)
    arguments = list(inspect.signature(module.forward).parameters)
    if "alibi" in arguments:
        place = arguments.index("alibi")
        module.register_forward_pre_hook(_AlibiOf(heads.queries, first * each, count * each, place), with_kwargs=True)


class HeadsConfig:
    """A model's config, but for the numbers of heads of one attention on this rank: `local`.

    Whatever changes in the model's config later is seen here, too, and what is set here is set there.
    """

    def __init__(self, config: Any, local: Mapping[str, int]) -> None:
        self.__dict__.update(local, _config=config)

    def __getattr__(self, name: str) -> Any:
        if name == "_config":  # a copy that is not filled yet
            raise AttributeError(name)
        return getattr(self._config, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._config, name, value)


@dataclass(frozen=True, slots=True)
class _AlibiOf:
    """Forward pre-hook: of the biases of all heads, [batch * heads, ...], those of this rank's."""

    heads: int
    first: int
    count: int
    place: int

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The same arguments with a narrower `alibi`."""
        if isinstance(kwargs.get("alibi"), Tensor):
            return args, kwargs | {"alibi": self.narrow(kwargs["alibi"])}
        if len(args) > self.place and isinstance(args[self.place], Tensor):
            return (*args[: self.place], self.narrow(args[self.place]), *args[self.place + 1 :]), kwargs
        return args, kwargs

    def narrow(self, alibi: Tensor) -> Tensor:
        """This rank's heads."""
        rest = alibi.shape[1:]
        return alibi.reshape(-1, self.heads, *rest).narrow(1, self.first, self.count).reshape(-1, *rest)
