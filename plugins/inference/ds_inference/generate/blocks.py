"""Which blocks of the KV cache are free, and how many sequences share each of the others."""

from __future__ import annotations

from collections.abc import Iterable

from ds_inference_kit.step import BLOCK


def blocks_for(tokens: int) -> int:
    """How many blocks `tokens` tokens need."""
    return (tokens + BLOCK - 1) // BLOCK


class Blocks:
    """A pool of `total` blocks.

    A block is free when no sequence has it; the one freed last is given out first.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        # The lowest number is given out first, since `pop` takes the last of the list.
        self._free = list(range(total - 1, -1, -1))
        # How many sequences share each block; 0: it is free.
        self._holders = [0] * total

    @property
    def free(self) -> int:
        """How many blocks no sequence has."""
        return len(self._free)

    def take(self) -> int | None:
        """A free block, for one sequence; None: there is none."""
        if not self._free:
            return None
        block = self._free.pop()
        self._holders[block] = 1
        return block

    def share(self, blocks: Iterable[int]) -> list[int]:
        """`blocks`, each with one sequence more."""
        blocks = list(blocks)
        for block in blocks:
            assert self._holders[block] > 0, f"block {block} is free"
            self._holders[block] += 1
        return blocks

    def shared(self, block: int) -> bool:
        """Whether more than one sequence has `block`, so that it must not be written."""
        return self._holders[block] > 1

    def give_back(self, blocks: Iterable[int]) -> None:
        """Count one sequence less for each of `blocks`."""
        for block in blocks:
            self._holders[block] -= 1
            # Its keys and values are not erased: the next user of the block writes each row before
            # reading it.
            if self._holders[block] == 0:
                self._free.append(block)
            assert self._holders[block] >= 0, f"block {block} was given back twice"
