"""The loader that `training_data` gives: shuffled per epoch, split over dp ranks, resumable at any batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, Sampler

from ds_core.errors import UsageError

__all__ = ["DistributedLoader", "RankSampler", "RepeatingLoader"]


class RankSampler(Sampler[int]):
    """This rank's indices of one epoch: a seeded shuffle, padded by wrapping (or cut) so that ranks get equally many.

    The order depends on (seed, epoch) only, so any world size walks through the same permutation.
    """

    def __init__(
        self, length: int, replicas: int, index: int, *, shuffle: bool = True, seed: int = 0, drop_last: bool = False
    ) -> None:
        self.length, self.replicas, self.index = length, replicas, index
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        self.epoch = 0
        self.count = length // replicas if drop_last else math.ceil(length / replicas)

    def __iter__(self) -> Iterator[int]:
        if self.shuffle:
            order = torch.randperm(
                self.length, generator=torch.Generator().manual_seed(self.seed + self.epoch)
            ).tolist()
        else:
            order = list(range(self.length))
        total = self.count * self.replicas
        if total > self.length:
            order = (order * math.ceil(total / max(1, self.length)))[:total]
        return iter(order[self.index : total : self.replicas])

    def __len__(self) -> int:
        return self.count


class DistributedLoader:
    """Batches of this rank's share of a dataset; iterating again starts the next epoch.

    Yields whatever `collate_fn` (torch's default otherwise) makes: tensors, tuples, dicts. An IterableDataset is
    taken as already split over ranks. `state_dict` is the position (epoch, batches already yielded); after
    `load_state_dict` the next iteration goes on from there without loading what was seen.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        *,
        replicas: int = 1,
        index: int = 0,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        pin_memory: bool = False,
        sampler: Sampler[Any] | None = None,
    ) -> None:
        if batch_size < 1:
            raise UsageError(f"batch_size is {batch_size}; it must be at least 1")
        self.dataset, self.batch_size, self.replicas, self.seed = dataset, batch_size, replicas, seed
        self.epoch = 0
        self.position = 0
        self._skip = 0
        self._iterable = isinstance(dataset, IterableDataset)
        self._generator = torch.Generator()
        kwargs: dict[str, Any] = {
            "collate_fn": collate_fn,
            "num_workers": num_workers,
            "pin_memory": pin_memory,
            "generator": self._generator,
        }
        if self._iterable:
            self._loader = DataLoader(dataset, batch_size=batch_size, drop_last=drop_last, **kwargs)
            return
        length = len(dataset)  # type: ignore[arg-type]
        if length == 0:
            raise UsageError("training_data is empty")
        self._sampler = sampler or RankSampler(length, replicas, index, shuffle=shuffle, seed=seed, drop_last=drop_last)
        self._batches = _SkippingBatches(self._sampler, batch_size, drop_last)
        if not len(self._batches):
            raise UsageError(
                f"training_data has {length} samples, fewer than one batch of {batch_size} on each of "
                f"{replicas} ranks, and "
                "dataloader_drop_last drops it; lower train_micro_batch_size_per_gpu or set "
                "dataloader_drop_last to false"
            )
        self._loader = DataLoader(dataset, batch_sampler=self._batches, **kwargs)

    def __len__(self) -> int:
        return len(self._loader) if self._iterable else len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        skip, self._skip = self._skip, 0
        if self.position > skip:  # the last pass was left early
            self.epoch += 1
        self.position = skip
        # Its own generator keeps torch's global one, and so a resumed run, untouched by how often a loader starts.
        self._generator.manual_seed(self.seed + self.epoch)
        if not self._iterable:
            if hasattr(self._sampler, "set_epoch"):
                self._sampler.set_epoch(self.epoch)
            elif isinstance(self._sampler, RankSampler):
                self._sampler.epoch = self.epoch
            self._batches.skip = skip
        batches = iter(self._loader)
        if self._iterable:
            for _ in range(skip):
                next(batches, None)
        for batch in batches:
            self.position += 1
            yield batch
        self.epoch += 1
        self.position = 0

    def set_batch_size(self, batch_size: int) -> None:
        """Samples per batch from the next iteration on, which goes on where this one is (rounded down to a batch)."""
        if batch_size < 1:
            raise UsageError(f"batch_size is {batch_size}; it must be at least 1")
        place = self.state_dict()
        self.batch_size = batch_size
        if self._iterable:
            old = self._loader
            self._loader = DataLoader(
                old.dataset,
                batch_size=batch_size,
                drop_last=old.drop_last,
                collate_fn=old.collate_fn,
                num_workers=old.num_workers,
                pin_memory=old.pin_memory,
                generator=self._generator,
            )
        else:
            self._batches.batch_size = batch_size
        self.load_state_dict(place)

    def state_dict(self) -> dict[str, int]:
        """The position: epoch, batches yielded in it, and what they counted."""
        return {
            "epoch": self.epoch,
            "batches": self.position,
            "samples": self.position * self.batch_size * self.replicas,
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from `state` at the next iteration; another batch size or world goes on at the same sample."""
        self.epoch = int(state["epoch"])
        self._skip = int(state["samples"]) // (self.batch_size * self.replicas)
        if not self._iterable and self._skip >= len(self._batches):  # saved after the last batch of an epoch
            self.epoch, self._skip = self.epoch + 1, 0
        self.position = self._skip


class _SkippingBatches(BatchSampler):
    """A BatchSampler whose next pass leaves out the first `skip` batches, without loading them."""

    skip = 0

    def __iter__(self) -> Iterator[list[int]]:
        skip, self.skip = self.skip, 0
        for i, batch in enumerate(super().__iter__()):
            if i >= skip:
                yield batch


class RepeatingLoader:
    """Wraps a loader so that it never ends: a new pass begins where the last one stopped."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self._iterator: Iterator[Any] | None = None

    def __iter__(self) -> RepeatingLoader:
        return self

    def __next__(self) -> Any:
        if self._iterator is None:
            self._iterator = iter(self.loader)
        try:
            return next(self._iterator)
        except StopIteration:
            self._iterator = iter(self.loader)
        try:
            return next(self._iterator)
        except StopIteration:
            raise UsageError("the loader that RepeatingLoader wraps is empty") from None

    def __len__(self) -> int:
        return len(self.loader)
