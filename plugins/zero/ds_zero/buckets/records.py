"""What buckets, masters and the code around them share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import nn

if TYPE_CHECKING:
    from ds_run_state.states import StateTensor


@dataclass(slots=True, eq=False)
class Piece:
    """The elements [start, stop) of a flattened parameter, which this rank's optimizer updates
    through `master`.

    shape: of the full parameter. index: of the parameter in its bucket. at: offset of the piece in
    the shard.
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


class DeferredUpdates(Protocol):
    """Who updates a bucket's masters and weights at times of its own: see `ds_zero.zenflow`."""

    def follow(self, piece: Piece) -> None:
        """The master of `piece`, or an optimizer state of it, was written."""

    def saved(self, piece: Piece, store: bool) -> Iterator[StateTensor]:
        """What checkpoints keep of `piece` beside its weight and its optimizer states. store: see
        `StateTensor`.
        """
