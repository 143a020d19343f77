"""The section ``sparse_attention``: which blocks of keys a block of queries looks at
(torch-free)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal

from pydantic import model_validator

from ds_core.config import Section, option

USED: dict[str, frozenset[str]] = {
    "dense": frozenset(),
    "fixed": frozenset(
        {
            "num_local_blocks",
            "num_global_blocks",
            "horizontal_global_attention",
            "num_different_global_patterns",
        }
    ),
    "variable": frozenset(
        {
            "num_random_blocks",
            "local_window_blocks",
            "global_block_indices",
            "global_block_end_indices",
            "horizontal_global_attention",
        }
    ),
    "bigbird": frozenset({"num_random_blocks", "num_sliding_window_blocks", "num_global_blocks"}),
    "bslongformer": frozenset(
        {"num_sliding_window_blocks", "global_block_indices", "global_block_end_indices"}
    ),
}
"""Mode -> the keys that it reads, besides mode, block, attention and different_layout_per_head."""


class SparseAttentionConfig(Section):
    """Patterns of blocks; `ds_sparse_attention.layouts` says what each mode looks at."""

    mode: Literal["dense", "fixed", "variable", "bigbird", "bslongformer"] = option(
        "fixed", "The pattern: dense (all blocks), fixed, variable, bigbird, bslongformer."
    )
    block: int = option(16, "Tokens along the edge of a block.", ge=1)
    different_layout_per_head: bool = option(
        False,
        "Each head has different global or random blocks; false: all heads have those of the "
        "first.",
    )
    num_local_blocks: int = option(4, "Blocks of a local window; fixed.", ge=1)
    num_global_blocks: int = option(
        1, "Global blocks of a window (fixed), or at the start (bigbird).", ge=1
    )
    attention: Literal["bidirectional", "unidirectional"] = option(
        "bidirectional", "unidirectional: a token looks at itself and those before it."
    )
    horizontal_global_attention: bool = option(
        False, "Global blocks look at all tokens, too; fixed and variable, bidirectional only."
    )
    num_different_global_patterns: int = option(
        1, "Places of the global blocks in a window, alternating over the heads; fixed.", ge=1
    )
    num_random_blocks: int = option(
        0, "Blocks drawn at random for each row of blocks; variable, bigbird.", ge=0
    )
    local_window_blocks: list[int] = option(
        [4],
        "Blocks of the first local windows; the last number goes for all that follow. variable.",
        min_length=1,
    )
    global_block_indices: list[int] = option(
        [0], "Global blocks, or the first one of each range; variable, bslongformer."
    )
    global_block_end_indices: list[int] | None = option(
        None,
        "Where the range of each global_block_indices ends, itself not global; null: each is one "
        "block.",
    )
    num_sliding_window_blocks: int = option(
        3, "Blocks around each block, itself included; bigbird, bslongformer.", ge=1
    )

    @property
    def causal(self) -> bool:
        """Whether a token looks at no later one."""
        return self.attention == "unidirectional"

    @model_validator(mode="after")
    def _goes_together(self) -> SparseAttentionConfig:
        if problem := next(self._problems(), None):
            raise ValueError(problem)
        return self

    def _problems(self) -> Iterator[str]:
        if self.horizontal_global_attention and self.causal:
            yield (
                "horizontal_global_attention needs attention: bidirectional; leave one of the "
                "two out"
            )
        if self.mode == "fixed":
            yield from self._problems_of_fixed()
        if any(size < 1 for size in self.local_window_blocks):
            yield "local_window_blocks has a number below 1"
        starts = self.global_block_indices
        ends = self.global_block_end_indices
        if any(index < 0 for index in starts):
            yield "global_block_indices has a negative number"
        if ends is not None:
            if len(ends) != len(starts):
                yield (
                    f"global_block_end_indices has {len(ends)} numbers, and global_block_indices "
                    f"{len(starts)}; each range needs both"
                )
            elif any(start >= end for start, end in zip(starts, ends, strict=True)):
                yield (
                    "global_block_end_indices must each be larger than the first block of the range"
                )

    def _problems_of_fixed(self) -> Iterator[str]:
        local = self.num_local_blocks
        count = self.num_global_blocks
        if local % count:
            yield f"num_local_blocks ({local}) must be a multiple of num_global_blocks ({count})"
        if self.num_different_global_patterns > 1 and not self.different_layout_per_head:
            yield "num_different_global_patterns above 1 needs different_layout_per_head: true"
        if self.num_different_global_patterns > local // count:
            yield (
                f"num_different_global_patterns is {self.num_different_global_patterns}, but a "
                f"window has {local // count} places for global blocks; give at most that"
            )

    def remarks(self, given: Any) -> Iterable[tuple[str, str]]:
        """Keys that the mode does not read."""
        read = USED[self.mode]
        for key in given if isinstance(given, dict) else ():
            if key in ALL - read:
                yield key, f"has no effect with mode {self.mode}"


ALL = frozenset[str]().union(*USED.values())
