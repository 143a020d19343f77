"""The rows of one step, and the KV cache that attention reads and extends.

The cache is *paged*: keys and values of a sequence lie in blocks of `BLOCK` tokens, anywhere in one
arena, and a table says which. So sequences of unequal lengths share memory without holes, and beams
share the blocks of what they have in common.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 32
"""Tokens per block."""


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """The rows of a step: of each sequence one (decoding), some (a part of a prompt) or all,
    sequence after sequence.

    tokens, positions: int32 [rows]. Positions are for `Embed` and `Rotate` alone; attention and the
        cache count tokens: the last row of a sequence is its token length - 1.
    starts: int32 [sequences + 1]; rows of sequence i are ``starts[i]:starts[i + 1]``.
    lengths: int32 [sequences]; tokens of each that are in the cache after this step.
    blocks: int32 [sequences, most]; token p of sequence i lies in block ``blocks[i, p // BLOCK]``.
        None: no cache.
    wanted: int64 [m], the rows that `Keep` keeps; None: all. types: int32 [rows], token types.
        embeds: [rows, width], instead of `tokens`. All on the device of the program's weights but
        `starts` and `lengths`, which are on the CPU.
    """

    tokens: Tensor
    positions: Tensor
    starts: Tensor
    lengths: Tensor
    blocks: Tensor | None = None
    wanted: Tensor | None = None
    types: Tensor | None = None
    embeds: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class KVCache:
    """keys, values: [layers, blocks, kv_heads, BLOCK, head_dim], contiguous, of one dtype (fp32,
    bf16 or fp16).
    """

    keys: Tensor
    values: Tensor

    @staticmethod
    def make(
        layers: int,
        blocks: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> KVCache:
        """An empty cache of `blocks` blocks; memory that no token was written to is not touched on
        a CPU.
        """
        shape = layers, blocks, kv_heads, BLOCK, head_dim
        return KVCache(
            torch.empty(shape, dtype=dtype, device=device),
            torch.empty(shape, dtype=dtype, device=device),
        )

    @property
    def blocks(self) -> int:
        """How many blocks there are."""
        return self.keys.shape[1]
