"""Sparse attention of one model: the section, and the patterns made of it for each length of
sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from ds_core.errors import UsageError
from ds_sparse_attention.blocks import Allowed, Pattern, attend_blocks, make_pattern
from ds_sparse_attention.config import SparseAttentionConfig
from ds_sparse_attention.layouts import make_layout

K = TypeVar("K")
V = TypeVar("V")

KEPT = 16
"""Layouts and patterns that are kept, of the lengths that were used last."""


class SparseAttention:
    """Attends by the patterns of `config`.

    first_head, heads: for different_layout_per_head, where a rank has some of the heads.
    """

    def __init__(
        self, config: SparseAttentionConfig, first_head: int = 0, heads: int | None = None
    ) -> None:
        self.config = config
        self._first = first_head
        self._heads = heads
        # By heads and length: every layer of a step asks for the same ones.
        self._layouts: dict[tuple[int, int], Tensor] = {}
        self._patterns: dict[tuple[int, int, torch.device], Pattern] = {}

    def pattern(self, heads: int, tokens: int, device: torch.device) -> Pattern:
        """The pattern of sequences of `tokens` tokens; the last block may be shorter."""
        rows = -(-tokens // self.config.block)
        make = partial(self._make_pattern, heads, rows, device)
        return _kept(self._patterns, (heads, rows, device), make)

    def layout(self, heads: int, rows: int) -> Tensor:
        """`make_layout`, of the heads that this rank has; not to be changed, since it is kept."""
        return _kept(self._layouts, (heads, rows), partial(self._make_layout, heads, rows))

    def _make_pattern(self, heads: int, rows: int, device: torch.device) -> Pattern:
        return make_pattern(self.layout(heads, rows), self.config.block, device)

    def _make_layout(self, heads: int, rows: int) -> Tensor:
        # Of all heads of the model, as random blocks are drawn head by head; then those of this
        # rank.
        whole = make_layout(self.config, self._heads or heads, rows)
        return whole if len(whole) == 1 else whole[self._first : self._first + heads]

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        causal: bool = False,
        allowed: Allowed | None = None,
        dropout: float = 0.0,
        scale: float | None = None,
        first: int | None = None,
    ) -> Tensor:
        """The attention of whole sequences, or of some queries of one; see `attend_blocks`.

        query: [batch, heads, tokens, size].
        key, value: may have more tokens (generation with a cache). Then queries are few, and see all
            keys under a mask of the pattern.
        first: the position of the first query among the keys; None: the queries are the last.

        Raises UsageError where there are fewer keys than queries, or heads is no multiple of the
        keys' heads.
        """
        _, heads, tokens, _ = query.shape
        _, key_heads, keys, _ = key.shape
        if heads % key_heads:
            raise UsageError(
                f"sparse attention: {heads} heads of queries share {key_heads} heads of keys "
                "unevenly"
            )
        causal = causal or self.config.causal
        options: dict[str, Any] = {"dropout": dropout, "scale": scale}
        if keys < tokens:
            raise UsageError(
                f"sparse attention: {tokens} queries, but {keys} keys; it is for attention of a "
                "sequence to itself"
            )
        first = keys - tokens if first is None else first
        # A full sequence: block by block. Some queries (a step of generation): one masked
        # attention, as blocks of queries would be nearly empty.
        if keys == tokens:
            pattern = self.pattern(heads, tokens, query.device)
            return attend_blocks(
                query, key, value, pattern, causal=causal, allowed=allowed, **options
            )
        mask = self._some_rows(query, first, keys, causal, allowed)
        return functional.scaled_dot_product_attention(
            query, key, value, mask, dropout, scale=scale, enable_gqa=heads != key_heads
        )

    def _some_rows(
        self, query: Tensor, first: int, keys: int, causal: bool, allowed: Allowed | None
    ) -> Tensor:
        """The mask of some queries of a sequence of `keys` tokens: bool [batch or 1, heads or 1,
        queries, keys].
        """
        batch, heads, tokens, _ = query.shape
        edge = self.config.block
        device = query.device
        layout = self.layout(heads, -(-keys // edge)).to(device)
        q = torch.arange(first, first + tokens, device=device)
        k = torch.arange(keys, device=device)
        mask = layout[:, q // edge][:, :, k // edge][None]
        if causal:
            mask = mask & (q[:, None] >= k)
        if allowed is not None:
            mask = (
                mask
                & allowed(torch.arange(batch, device=device)[:, None, None], q[:, None], k)[:, None]
            )
        return mask


def _kept(cache: dict[K, V], key: K, make: Callable[[], V]) -> V:
    """What `cache` has for `key`, made where it is not there; the oldest goes where there are too
    many.
    """
    if key not in cache:
        while len(cache) >= KEPT:
            del cache[next(iter(cache))]
        cache[key] = make()
    return cache[key]


class SparseSelfAttention(nn.Module):
    """Sparse attention for a model of one's own; it has no parameters.

    config: the section, as a model or a dict; None: that of the run (``sparse_attention`` in the
    config of `ds_core.initialize`).
    """

    def __init__(self, config: SparseAttentionConfig | dict[str, Any] | None = None) -> None:
        super().__init__()
        if isinstance(config, dict):
            config = SparseAttentionConfig.model_validate(config)
        self.attention = None if config is None else SparseAttention(config)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        dropout: float = 0.0,
    ) -> Tensor:
        """[batch, heads, tokens, size] -> the same.

        key_padding_mask: [batch, tokens], true for tokens that count.
        """
        if self.attention is None:
            raise UsageError(
                "SparseSelfAttention has no pattern: give it a config, or the run a section "
                "sparse_attention"
            )
        allowed: Allowed | None = None
        if key_padding_mask is not None:
            if key_padding_mask.dtype != torch.bool:
                raise UsageError("key_padding_mask must be bool, true for tokens that count")
            counts = key_padding_mask

            def allowed(sample: Tensor, q: Tensor, k: Tensor) -> Tensor:
                return counts[sample, k]

        return self.attention(
            query, key, value, allowed=allowed, dropout=dropout if self.training else 0.0
        )
