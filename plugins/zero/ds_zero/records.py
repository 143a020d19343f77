"""What a flat bucket and the code around it share: pieces, and the tensors of optimizers that need full ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

__all__ = ["OptimizerTensors", "Piece"]


@dataclass(slots=True, eq=False)
class Piece:
    """The elements [start, stop) of a flattened parameter, which this rank's optimizer updates through `master`.

    shape: of the full parameter. index: of the parameter in its bucket. at: offset of the piece in the shard.
    """

    name: str
    param: nn.Parameter
    shape: tuple[int, ...]
    index: int
    start: int
    stop: int
    at: int
    master: nn.Parameter

    @property
    def within(self) -> slice:
        """The piece as a range of the shard."""
        return slice(self.at, self.at + self.stop - self.start)


class OptimizerTensors(Protocol):
    """A bucket's parameters as an optimizer that needs full tensors gets them: see `ds_zero.owned_tensors`."""

    pieces: list[Piece]
    owners: list[int]

    def weight_targets(self) -> list[Tensor | None]:
        """See `FlatBucket.weight_targets`."""

    def update_shard(self) -> None:
        """See `FlatBucket.update_shard`."""

    def refresh(self) -> None:
        """See `FlatBucket.refresh`."""

    def gradients(self, shard: Tensor, used: Sequence[bool]) -> list[Tensor | None]:
        """The full gradient of each piece."""
