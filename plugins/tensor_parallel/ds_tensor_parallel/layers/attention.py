"""Attention modules: how their heads are divided over ranks, and what a rank's share changes.

Weights of attention are divided by whole groups: the query heads that share a key and value head,
and that head. A model that derives the number of heads from its weights (transformers' ``view(...,
-1, head_dim)``) needs nothing else; of the others, attributes that count heads become this rank's.

[Note: fewer keys than ranks] Then query heads are divided one by one, and each rank computes the
keys and values of its query heads: the weights of these stay whole on all ranks, and their
gradients are summed (`layers.Copied`).
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ds_tensor_parallel.planning.division import Division

QUERY_HEADS = (
    "num_heads",
    "num_attention_heads",
    "n_heads",
    "n_head",
    "num_attention_heads_per_partition",
)
KEY_HEADS = (
    "num_key_value_heads",
    "num_kv_heads",
    "n_kv_heads",
    "num_multi_query_groups_per_partition",
)
SIZES = ("head_dim", "attention_head_size", "hidden_size_per_attention_head", "key_value_proj_dim")
WIDTHS = (
    "split_size",
    "all_head_size",
    "inner_dim",
    "projection_size",
    "hidden_size_per_partition",
)
GROUPS = ("num_key_value_groups",)
BIASES = ("alibi", "position_bias")
"""Arguments of forward: what is added to the scores of each head."""
_SIGNS = (*QUERY_HEADS, *KEY_HEADS, *SIZES, *GROUPS)


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads of an attention."""

    queries: int
    keys: int
    size: int
    """Of one head; 0: the module does not say."""

    @property
    def fused(self) -> tuple[int, int, int]:
        """The widths of queries, keys and values."""
        return self.queries * self.size, self.keys * self.size, self.keys * self.size

    def units(self, ranks: int) -> int:
        """The number of parts into which the widths of its queries and of its outputs divide."""
        return self.keys if self.keys >= ranks else self.queries

    def share(self, ranks: int, rank: int) -> Share:
        """What the rank works on. See [Note: fewer keys than ranks]."""
        units = self.units(ranks)
        each = self.queries // self.keys
        ((first, count),) = Division.by_unit((units,), 1, ranks).ranges(rank)
        if units == self.keys:
            return Share(first * each, count * each, tuple(range(first, first + count)))
        # Query heads one by one: which key heads do they need, and how often?
        used = Counter(query // each for query in range(first, first + count))
        # Attention repeats each key head equally often; where this rank's queries use them
        # unequally, each query gets a key head of its own.
        alike = len(set(used.values())) == 1
        return Share(first, count, tuple(used if alike else used.elements()))


@dataclass(frozen=True, slots=True)
class Share:
    """A rank's part of an attention."""

    first: int
    """Its first query head."""
    count: int
    """Its query heads."""
    keys: tuple[int, ...]
    """The key heads that it computes for them; one is listed once per query where the rank has more
    queries of one key head than of another."""


def heads_of(module: nn.Module) -> Heads | None:
    """The heads of `module`; None where it is no attention, or one whose keys do not divide its
    queries.
    """
    if not any(isinstance(getattr(module, name, None), int) for name in _SIGNS):
        return None
    config = getattr(module, "config", None)
    queries = _count(module, QUERY_HEADS) or _count(config, QUERY_HEADS)
    if not queries:
        return None
    # In this order: what the module itself says, multi-query (one key head, a flag of Falcon's),
    # the config, else as many as queries.
    groups = _count(module, GROUPS)
    keys = queries // groups if groups else _count(module, KEY_HEADS)
    if not keys:
        multi_query = getattr(module, "multi_query", False) and not getattr(
            module, "new_decoder_architecture", False
        )
        keys = 1 if multi_query else _count(config, KEY_HEADS) or queries
    size = _count(module, SIZES) or _count(config, SIZES)
    return Heads(queries, keys, size) if queries % keys == 0 else None


def _count(source: object, names: tuple[str, ...]) -> int:
    """The first of these attributes that is a number; 0: none."""
    return next((v for n in names if isinstance(v := getattr(source, n, None), int) and v > 0), 0)


def keep_heads(module: Any, heads: Heads, mine: Share) -> None:
    """Let `module`, whose weights were cut, work on its share of the heads."""
    keys = len(mine.keys)
    changes = [
        (QUERY_HEADS, heads.queries, mine.count),
        (KEY_HEADS, heads.keys, keys),
        (GROUPS, heads.queries // heads.keys, mine.count // keys),
        (WIDTHS, heads.queries * heads.size, mine.count * heads.size),
    ]
    # By value: an attribute counts heads only if it has exactly the full number.
    for part in (module, *module.children()):
        for names, whole, here in changes:
            for name in names:
                if vars(part).get(name) == whole:
                    setattr(part, name, here)
    config = getattr(module, "config", None)
    # The config is shared by all layers, and by code outside of attention: it stays, and this
    # module gets a view of it with its own numbers.
    if config is not None and not isinstance(config, HeadsConfig):
        local = {n: mine.count for n in QUERY_HEADS if getattr(config, n, None) == heads.queries}
        local |= {n: keys for n in KEY_HEADS if getattr(config, n, None) == heads.keys}
        module.config = HeadsConfig(config, local)
    # Biases for all heads are computed outside, the same for every layer.
    for place, name in enumerate(inspect.signature(module.forward).parameters):
        if name in BIASES:
            narrow = _BiasesOf(heads.queries, mine.first, mine.count, place, name)
            module.register_forward_pre_hook(narrow, with_kwargs=True)


class HeadsConfig:
    """A model's config, but for the numbers of heads of one attention on this rank: `local`.

    Whatever changes in the model's config later is seen here, too, and what is set here is set
    there.
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
class _BiasesOf:
    """Forward pre-hook: of the biases of all heads, [heads, ...] or [batch * heads, ...], those of
    this rank's.
    """

    heads: int
    first: int
    count: int
    place: int
    name: str

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The same arguments with narrower biases."""
        # By keyword or by position, as the model calls it.
        if isinstance(given := kwargs.get(self.name), Tensor):
            return args, kwargs | {self.name: self.narrow(given)}
        if len(args) > self.place and isinstance(args[self.place], Tensor):
            return (
                *args[: self.place],
                self.narrow(args[self.place]),
                *args[self.place + 1 :],
            ), kwargs
        return args, kwargs

    def narrow(self, biases: Tensor) -> Tensor:
        """This rank's heads; of four dimensions they are what an attention computed from its own
        table.
        """
        if biases.dim() != 3:
            return biases
        rest = biases.shape[1:]
        return (
            biases.reshape(-1, self.heads, *rest)
            .narrow(1, self.first, self.count)
            .reshape(-1, *rest)
        )
