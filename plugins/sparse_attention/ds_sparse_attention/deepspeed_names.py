"""The classes of ``deepspeed.ops.sparse_attention``, for scripts that use them: patterns as
objects, and the module.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ds_core.errors import UsageError
from ds_sparse_attention.attention import SparseAttention
from ds_sparse_attention.blocks import Allowed
from ds_sparse_attention.config import SparseAttentionConfig
from ds_sparse_attention.layouts import make_layout


class SparsityConfig:
    """A pattern for `num_heads` heads; keys are those of the section ``sparse_attention``."""

    mode = "dense"

    def __init__(
        self, num_heads: int, block: int = 16, different_layout_per_head: bool = False, **keys: Any
    ) -> None:
        self.num_heads = num_heads
        given = {
            "mode": self.mode,
            "block": block,
            "different_layout_per_head": different_layout_per_head,
            **keys,
        }
        self.config = SparseAttentionConfig.model_validate(given)

    @property
    def block(self) -> int:
        """Tokens along the edge of a block."""
        return self.config.block

    def make_layout(self, seq_len: int) -> Tensor:
        """The layout of sequences of `seq_len` tokens: int64 [heads, blocks, blocks]; whole blocks
        only.
        """
        if seq_len % self.block:
            raise UsageError(
                f"a sequence of {seq_len} tokens is no multiple of the block of {self.block}"
            )
        layout = make_layout(self.config, self.num_heads, seq_len // self.block).long()
        return layout.expand(self.num_heads, -1, -1).clone()


class DenseSparsityConfig(SparsityConfig):
    """Every block."""


class FixedSparsityConfig(SparsityConfig):
    """Windows, and global blocks in each."""

    mode = "fixed"


class VariableSparsityConfig(SparsityConfig):
    """Windows of any size, global and random blocks."""

    mode = "variable"


class BigBirdSparsityConfig(SparsityConfig):
    """A sliding window, the first blocks and random ones; one random block by default."""

    mode = "bigbird"

    def __init__(
        self,
        num_heads: int,
        block: int = 16,
        different_layout_per_head: bool = False,
        num_random_blocks: int = 1,
        **keys: Any,
    ) -> None:
        super().__init__(
            num_heads, block, different_layout_per_head, num_random_blocks=num_random_blocks, **keys
        )


class BSLongformerSparsityConfig(SparsityConfig):
    """A sliding window and global blocks."""

    mode = "bslongformer"


class SparseSelfAttention(nn.Module):
    """Attention by a `SparsityConfig`; masks of either mode, "add" (0 or very negative) or "mul" (1
    or 0).
    """

    def __init__(
        self,
        sparsity_config: SparsityConfig | None = None,
        key_padding_mask_mode: str = "add",
        attn_mask_mode: str = "mul",
        max_seq_length: int = 2048,
    ) -> None:
        super().__init__()
        for mode in (key_padding_mask_mode, attn_mask_mode):
            if mode not in ("add", "mul"):
                raise UsageError(f"the mode of a mask is {mode!r}; it must be 'add' or 'mul'")
        self.sparsity_config = sparsity_config or FixedSparsityConfig(num_heads=4)
        self.key_padding_mask_mode = key_padding_mask_mode
        self.attn_mask_mode = attn_mask_mode
        # Without effect: layouts are made for each length.
        self.max_seq_length = max_seq_length
        self.attention = SparseAttention(self.sparsity_config.config)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rpe: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
    ) -> Tensor:
        """[batch, heads, tokens, size] each.

        key_padding_mask: [batch, tokens].
        attn_mask: [tokens, tokens].
        """
        if rpe is not None:
            raise UsageError(
                "rpe is not offered: add relative positions to queries and keys (rotary embeddings)"
            )
        keys = (
            None
            if key_padding_mask is None
            else _to_bool(key_padding_mask, self.key_padding_mask_mode)
        )
        pairs = None if attn_mask is None else _to_bool(attn_mask, self.attn_mask_mode)

        # DeepSpeed's masks as rules over positions, of which only blocks of the pattern are read.
        def allowed(sample: Tensor, q: Tensor, k: Tensor) -> Tensor:
            shown = torch.ones_like(k, dtype=torch.bool) if pairs is None else pairs[q, k]
            return shown if keys is None else shown & keys[sample, k]

        limits: Allowed | None = None if keys is None and pairs is None else allowed
        return self.attention(query, key, value, allowed=limits)


def _to_bool(mask: Tensor, mode: str) -> Tensor:
    """A mask of either mode as a bool tensor; one that is bool already is true for what is
    seen.
    """
    if mask.dtype == torch.bool:
        return mask
    shown = mask > -1 if mode == "add" else mask != 0
    if mode == "add" and bool(((mask != 0) & shown).any()):
        raise UsageError("a mask to add must be 0 or very negative; other numbers are not offered")
    return shown
