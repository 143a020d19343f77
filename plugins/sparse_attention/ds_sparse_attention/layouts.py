"""From the section to a layout: for each head, which blocks of keys a row of blocks of queries
looks at.

The patterns: fixed is that of Sparse Transformers (Child et al. 2019), bigbird that of Zaheer et
al. 2020, bslongformer that of Longformer (Beltagy et al. 2020) in blocks; variable combines windows
of any size, global and random blocks.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ds_core.errors import UsageError
from ds_sparse_attention.config import SparseAttentionConfig

SEED = 0
"""Of random blocks: all ranks, and a run that is resumed, draw the same."""


def make_layout(config: SparseAttentionConfig, heads: int, rows: int) -> Tensor:
    """The layout of `rows` blocks of tokens: bool [heads, rows, rows], [1, rows, rows] where all
    heads have the same.

    [h, i, j]: tokens of block i look at tokens of block j. unidirectional: the lower triangle,
    diagonal included; inside a block of the diagonal the attention masks tokens that are later.
    Raises UsageError where a global block lies behind the last one.
    """
    generator = torch.Generator().manual_seed(SEED)
    count = heads if config.different_layout_per_head and config.mode != "dense" else 1
    layout = torch.zeros(count, rows, rows, dtype=torch.bool)
    for head in range(count):
        _FILL[config.mode](layout[head], config, head, generator)
    return layout.tril() if config.causal else layout


def _dense(
    layout: Tensor, config: SparseAttentionConfig, head: int, generator: torch.Generator
) -> None:
    layout.fill_(True)


def _fixed(
    layout: Tensor, config: SparseAttentionConfig, head: int, generator: torch.Generator
) -> None:
    """Windows of equal size; in each, the same few blocks are seen by all tokens (by later ones if
    causal).
    """
    rows = len(layout)
    local = config.num_local_blocks
    size = config.num_global_blocks
    _windows(layout, [local])
    # The last blocks of each window, as they summarize it (Child et al.); with several patterns the
    # next head has those before them.
    first = local - (1 + head % config.num_different_global_patterns) * size
    whole = rows - rows % local
    starts = list(range(first, whole, local))
    # The last window may be shorter.
    if whole < rows:
        starts.append(min(whole + first, rows - size))
    for start in starts:
        start = max(start, 0)
        layout[start if config.causal else 0 :, start : start + size] = True
        if config.horizontal_global_attention:
            layout[start : start + size] = True


def _variable(
    layout: Tensor, config: SparseAttentionConfig, head: int, generator: torch.Generator
) -> None:
    """Windows of the sizes given, global blocks and random ones."""
    _random(layout, config, generator)
    _windows(layout, config.local_window_blocks)
    for start, end in _ranges(config, len(layout)):
        layout[start if config.causal else 0 :, start:end] = True
        if config.horizontal_global_attention:
            layout[start:end] = True


def _bigbird(
    layout: Tensor, config: SparseAttentionConfig, head: int, generator: torch.Generator
) -> None:
    """Random blocks, a sliding window, and the first blocks, which see and are seen by all."""
    _random(layout, config, generator)
    _sliding(layout, config)
    count = min(config.num_global_blocks, len(layout))
    layout[:count] = True
    layout[:, :count] = True


def _bslongformer(
    layout: Tensor, config: SparseAttentionConfig, head: int, generator: torch.Generator
) -> None:
    """A sliding window, and global blocks, which see and are seen by all."""
    _sliding(layout, config)
    for start, end in _ranges(config, len(layout)):
        layout[start:end] = True
        layout[:, start:end] = True


_FILL = {
    "dense": _dense,
    "fixed": _fixed,
    "variable": _variable,
    "bigbird": _bigbird,
    "bslongformer": _bslongformer,
}


def _windows(layout: Tensor, sizes: list[int]) -> None:
    """Windows one after the other, whose blocks see each other; the last size goes for all that
    follow.
    """
    start = 0
    number = 0
    while start < len(layout):
        end = start + sizes[min(number, len(sizes) - 1)]
        layout[start:end, start:end] = True
        start = end
        number = number + 1


def _sliding(layout: Tensor, config: SparseAttentionConfig) -> None:
    place = torch.arange(len(layout))
    layout |= (place[:, None] - place).abs() <= config.num_sliding_window_blocks // 2


def _random(layout: Tensor, config: SparseAttentionConfig, generator: torch.Generator) -> None:
    """For each row as many blocks as asked; of a causal pattern among those that are not later."""
    for row in range(len(layout)):
        # Blocks above the diagonal would be cut off, and the row would have fewer than asked.
        among = row + 1 if config.causal else len(layout)
        layout[row, torch.randperm(among, generator=generator)[: config.num_random_blocks]] = True


def _ranges(config: SparseAttentionConfig, rows: int) -> Iterator[tuple[int, int]]:
    """The ranges of global blocks; a sequence may be too short for them, as long as it has the
    first.
    """
    starts = config.global_block_indices
    for start, end in zip(
        starts, config.global_block_end_indices or [s + 1 for s in starts], strict=True
    ):
        if start < rows:
            yield start, min(end, rows)
    if starts and min(starts) >= rows:
        raise UsageError(
            f"sparse_attention.global_block_indices: all global blocks lie behind the {rows} "
            "blocks of the sequence; lower them, or give longer sequences"
        )
