"""What buckets, masters and the code around them share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import nn

if TYPE_CHECKING:
    from ds_run_state.states import StateTensor


@dataclass(slots=True, eq=False)
class Fragment:
    """The elements [start, stop) of a flattened parameter, which this rank's optimizer updates."""

    name: str
    param: nn.Parameter
    # The shape of the full parameter.
    shape: tuple[int, ...]
    # The parameter's index in its bucket.
    index: int
    # The fragment is the elements start : stop of the flattened parameter.
    start: int
    stop: int
    # Its offset in the shard.
    at: int
    # What the optimizer updates.
    master: nn.Parameter

    @property
    def numel(self) -> int:
        """How many elements these are."""
        return self.stop - self.start

    @property
    def within(self) -> slice:
        """The fragment as a range of the shard."""
        return slice(self.at, self.at + self.numel)


class DeferredUpdates(Protocol):
    """Who updates a bucket's masters and weights at times of its own: see `ds_zero.zenflow`."""

    def follow(self, fragment: Fragment) -> None:
        """The master of `fragment`, or an optimizer state of it, was written."""

    def saved(self, fragment: Fragment, store: bool) -> Iterator[StateTensor]:
        """What checkpoints keep of `fragment` beside its weight and its optimizer states.

        store: see `StateTensor`.
        """
