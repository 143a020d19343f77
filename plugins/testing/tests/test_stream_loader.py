"""A loader over an ``IterableDataset`` passes the kit, and one that reads too early does not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from ds_testing import LoaderConformance
from torch.utils.data import IterableDataset


class Numbers(IterableDataset[int]):
    """0 to 47, in order."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(48))


class StreamLoader:
    """Each rank takes every n-th micro-batch of the stream; the position is the number of samples
    of all ranks.
    """

    def __init__(self, request: Any) -> None:
        self.request = request
        self.done = 0

    def __iter__(self) -> Iterator[list[int]]:
        request = self.request
        step = request.batch_size * request.replicas
        taken: list[int] = []
        for place, sample in enumerate(request.dataset):
            if place < self.done:
                continue
            taken.append(sample)
            if len(taken) == step:
                self.done += step
                first = request.index * request.batch_size
                yield taken[first : first + request.batch_size]
                taken = []
        self.done = 0

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.done = state["done"]


def ds_loader(request: Any) -> StreamLoader | None:
    return StreamLoader(request) if isinstance(request.dataset, Numbers) else None


class TestStream(LoaderConformance):
    load = (__name__,)
    shuffles = False
    drops = True

    def make_dataset(self) -> Numbers:
        return Numbers()

    def samples_of(self, batch: list[int]) -> list[int]:
        return batch


class Eager(StreamLoader):
    def __init__(self, request: Any) -> None:
        super().__init__(request)
        self.first = next(iter(request.dataset))


class TestEager(TestStream):
    """Only what the kit says of reading is asked here."""

    def make_loader(
        self, engine: Any, replicas: int = 1, index: int = 0, dataset: Any = None
    ) -> Any:
        return Eager(super().make_loader(engine, replicas, index, dataset).request)  # type: ignore[attr-defined]

    def test_making_and_loading_reads_nothing(self, engine: Any) -> None:
        with pytest.raises(AssertionError):
            super().test_making_and_loading_reads_nothing(engine)
