"""Which blocks of the KV cache are free, and how many sequences share each of the others."""

from __future__ import annotations

from collections.abc import Iterable

from ds_inference_kit.step import BLOCK


def blocks_for(tokens: int) -> int:
    """How many blocks hold `tokens` tokens."""
    return (tokens + BLOCK - 1) // BLOCK


class Blocks:
    """A pool of `total` blocks.

    A block is free when nobody holds it; the one freed last is given out first.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = list(range(total - 1, -1, -1))
        self._holders = [0] * total

    @property
    def free(self) -> int:
        """How many nobody holds."""
        return len(self._free)

    def take(self) -> int | None:
        """A free block, now held once; None: there is none."""
        if not self._free:
            return None
        block = self._free.pop()
        self._holders[block] = 1
        return block

    def share(self, blocks: Iterable[int]) -> list[int]:
        """`blocks`, each held once more."""
        blocks = list(blocks)
        for block in blocks:
            assert self._holders[block] > 0, f"block {block} is free"
            self._holders[block] += 1
        return blocks

    def shared(self, block: int) -> bool:
        """Whether more than one sequence holds `block`, so that it must not be written."""
        return self._holders[block] > 1

    def give_back(self, blocks: Iterable[int]) -> None:
        """Hold each of `blocks` once less."""
        for block in blocks:
            self._holders[block] -= 1
            if self._holders[block] == 0:
                self._free.append(block)
            assert self._holders[block] >= 0, f"block {block} was given back twice"
