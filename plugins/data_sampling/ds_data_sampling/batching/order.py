"""Which sample comes next, for all ranks together.

An order depends on the seed, the epoch and the step, never on the number of ranks or on how many
samples are asked for at a time; so its position, saved by one job, is good for a job of any size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from ds_data_sampling.config import DataEfficiency


class Order(Protocol):
    """Indices of samples, one epoch after the other.

    ``len()``: samples per epoch. It is not thread-safe.
    """

    def __len__(self) -> int:
        """Samples of an epoch."""
        ...

    def start(self, epoch: int) -> None:
        """Begin `epoch`, counted from 0, at its first sample."""
        ...

    def take(self, count: int, step: int) -> list[int]:
        """The next `count` indices, for the optimizer step `step` (from 0); fewer where the epoch
        ends, then none.
        """
        ...

    def state_dict(self) -> dict[str, Any]:
        """The position: JSON and tensors, the same for every number of ranks."""
        ...

    def load_state_dict(self, state: Any) -> None:
        """Go on from `state`."""
        ...


class Planned(ABC):
    """An order whose epochs are planned as a whole: `size` samples each, by `indices`."""

    def __init__(self, size: int, seed: int) -> None:
        self._size = size
        self._seed = seed
        self.start(0)

    @abstractmethod
    def indices(self, epoch: int) -> Any:
        """The indices of an epoch, in order: a tensor or an array of int64."""

    def __len__(self) -> int:
        return self._size

    def start(self, epoch: int) -> None:
        """Begin `epoch` at its first sample."""
        self._epoch = epoch
        self._taken = 0
        self._indices: Any = None  # made at the first use: some ranks never take a sample

    def take(self, count: int, step: int) -> list[int]:
        """The next `count` indices of the epoch; `step` does not matter."""
        if self._indices is None:
            self._indices = self.indices(self._epoch)
        found: list[int] = self._indices[self._taken : self._taken + count].tolist()
        self._taken += len(found)
        return found

    def state_dict(self) -> dict[str, Any]:
        """The epoch, and the samples taken in it."""
        return {"epoch": self._epoch, "taken": self._taken}

    def load_state_dict(self, state: Any) -> None:
        """Go on from `state`."""
        self.start(int(state["epoch"]))
        self._taken = int(state["taken"])


class Shuffled(Planned):
    """Every sample once per epoch, in the order that the core's own loader has for (seed, epoch).

    shuffle: False takes samples as they lie.
    """

    def __init__(self, size: int, seed: int, shuffle: bool = True) -> None:
        super().__init__(size, seed)
        self._shuffle = shuffle

    def indices(self, epoch: int) -> torch.Tensor:
        """A permutation, or none."""
        if not self._shuffle:
            return torch.arange(self._size)
        return torch.randperm(
            self._size, generator=torch.Generator().manual_seed(self._seed + epoch)
        )


def make_order(
    section: DataEfficiency,
    size: int,
    *,
    shuffle: bool = True,
    schedules: Mapping[str, Callable[[int], int]] | None = None,
) -> Order:
    """The order of a dataset of `size` samples that `section` asks for: by difficulty, shuffled,
    or as they lie.

    schedules: those of metrics whose schedule_type is custom; see `ByDifficulty`.
    """
    if (settings := section.curriculum) is None:
        return Shuffled(size, section.seed, shuffle)
    from ds_data_sampling.curricula.curriculum import ByDifficulty

    return ByDifficulty(settings, size, section.seed, schedules)
