"""The rows of one step, and the KV cache that attention reads and extends.

The cache is *paged*: keys and values of a sequence lie in blocks of `BLOCK` tokens, anywhere in one
arena, and a table says which. So sequences of unequal lengths share memory without holes, and beams
share the blocks of what they have in common.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Float, Int

BLOCK = 32
"""Tokens per block."""


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """The rows of a step: of each sequence one (decoding), some (a part of a prompt) or all,
    sequence after sequence.

    All tensors are int32 where nothing else is said, and on the device of the program's weights,
    but `starts` and `lengths`, which are on the CPU.
    """

    tokens: Int[Tensor, " rows"]
    # For `Embed` and `Rotate` alone; attention and the cache count tokens: the last row of a
    # sequence is its token length - 1.
    positions: Int[Tensor, " rows"]
    # One more than there are sequences; rows of sequence i are ``starts[i]:starts[i + 1]``.
    starts: Int[Tensor, " bounds"]
    # Tokens of each sequence that are in the cache after this step.
    lengths: Int[Tensor, " sequences"]
    # Token p of sequence i is in block ``blocks[i, p // BLOCK]``; a row for each sequence, and maybe
    # more. None: no cache.
    blocks: Int[Tensor, "tables most"] | None = None
    # The rows that `Keep` keeps, int64; None: all.
    wanted: Int[Tensor, " wanted"] | None = None
    # Token types.
    types: Int[Tensor, " rows"] | None = None
    # Vectors instead of the embeddings of `tokens`.
    embeds: Float[Tensor, "rows width"] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class KVCache:
    """Keys and values of all layers, contiguous, of one dtype (fp32, bf16 or fp16)."""

    keys: Float[Tensor, "layers blocks kv_heads tokens head_dim"]
    values: Float[Tensor, "layers blocks kv_heads tokens head_dim"]

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
