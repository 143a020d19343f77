"""From a dataset to this rank's batches: the contract of loaders, and the loader that is used
without a plugin.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, Sampler

from ds_core.errors import UsageError

if TYPE_CHECKING:
    from ds_core.context import Context


class Loader(Protocol):
    """This rank's batches, epoch after epoch, at a position that can be saved.

    `training_data` becomes one.

    Iterating again starts the next epoch. Making one reads no sample: some ranks never iterate
    theirs. Batches of unequal size carry a weight, since losses are averaged with equal ones; see
    docs/plugins/training.md. A loader may also have:

    - ``len()``: batches per epoch on this rank. Leave it out if that is unknown.
    - ``set_epoch(epoch)``: the next pass is that epoch; a position within it that was loaded is
      kept.
    - ``set_batch_size(samples)``: for `Engine.set_train_micro_batch_size`, which is an error
      without it.
    - ``samples_seen``: samples in the batches of all ranks yielded so far by this object. The
      engine then counts `global_samples` with it; without it each step counts the train batch size.
    """

    def __iter__(self) -> Iterator[Any]:
        """This rank's batches, from the position on; all ranks get equally many."""
        ...

    def state_dict(self) -> Mapping[str, Any]:
        """The position: JSON and tensors, equal on all ranks (one is saved), also of use at another
        world size.

        Asked after every update, where the next window begins, so it is cheap; what was given stays
        as it is.
        """
        ...

    def load_state_dict(self, state: Any) -> None:
        """Resume from `state` at the next iteration."""
        ...


@dataclass(frozen=True)
class LoaderRequest:
    """What a loader is to be made of; see the arguments of torch's DataLoader."""

    dataset: Any
    batch_size: int
    """Samples per micro-batch and rank."""

    # A loader depends on these two, never on the global rank, so that ranks with one index get the
    # same batches.
    replicas: int = 1
    """Data-parallel ranks."""
    index: int = 0
    """Which of them this is."""

    route: str = "train"
    """"train", or what else the user says."""
    seed: int = 0
    drop_last: bool = False
    collate_fn: Callable[[list[Any]], Any] | None = None
    num_workers: int = 0
    pin_memory: bool = False
    sampler: Sampler[Any] | None = None
    """Of indices, for this rank."""


class DistributedLoader:
    """Batches of this rank's share of a dataset, through torch's DataLoader and DistributedSampler.

    Route "train" is shuffled, by (seed, epoch) alone, so any world size walks through the same
    permutation. An IterableDataset is taken as already split over ranks. After `load_state_dict`
    the next iteration starts at that position without loading what was seen.
    """

    def __init__(self, request: LoaderRequest) -> None:
        dataset = request.dataset
        batch_size = request.batch_size
        if batch_size < 1:
            raise UsageError(f"batch_size is {batch_size}; it must be at least 1")
        self.batch_size = batch_size
        self._request = request
        self.epoch = 0
        # Batches that the running pass has yielded, and that the next one is to leave out.
        self.position = self._skip = 0
        self._generator = torch.Generator()
        self.sampler: Sampler[Any] | None = None
        if not isinstance(dataset, IterableDataset):
            if len(dataset) == 0:
                raise UsageError("training_data is empty")
            self.sampler = request.sampler or DistributedSampler(
                dataset,
                request.replicas,
                request.index,
                request.route == "train",
                request.seed,
                request.drop_last,
            )
        self._build()
        if self._batches is not None and not len(self._batches):
            raise UsageError(
                f"training_data has {len(dataset)} samples, fewer than one batch of {batch_size} "
                f"on each of {request.replicas} ranks, and dataloader_drop_last drops it; lower "
                "train_micro_batch_size_per_gpu or set dataloader_drop_last to false"
            )

    def _build(self) -> None:
        self._batches: _Batches | None = None
        if self.sampler is None:
            options: dict[str, Any] = {
                "batch_size": self.batch_size,
                "drop_last": self._request.drop_last,
            }
        else:
            self._batches = _Batches(self.sampler, self.batch_size, self._request.drop_last)
            options = {"batch_sampler": self._batches}
        self._loader: DataLoader[Any] = DataLoader(
            self._request.dataset,
            **options,
            collate_fn=self._request.collate_fn,
            num_workers=self._request.num_workers,
            pin_memory=self._request.pin_memory,
            generator=self._generator,
        )

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        skip, self._skip = self._skip, 0
        if self.position > skip:  # the last pass was left early
            self.epoch += 1
        self.position = skip
        # Its own generator keeps torch's global one, and so a resumed run, untouched by how often a
        # loader starts.
        self._generator.manual_seed(self._request.seed + self.epoch)
        if (set_epoch := getattr(self.sampler, "set_epoch", None)) is not None:
            set_epoch(self.epoch)
        if self._batches is not None:
            self._batches.skip, skip = skip, 0
        for batch in islice(iter(self._loader), skip, None):
            self.position += 1
            yield batch
        self.epoch += 1
        self.position = 0

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is `epoch`; a position within it that was loaded is kept."""
        if epoch != self.epoch or self.position > self._skip:
            self.epoch = epoch
            self.position = 0
            self._skip = 0

    def set_batch_size(self, batch_size: int) -> None:
        """Samples per batch from the next iteration on, which continues at the position of this one
        (rounded down to a batch).
        """
        place = self.state_dict()
        self.batch_size = batch_size
        self._build()
        self.load_state_dict(place)

    def state_dict(self) -> dict[str, int]:
        """The position: epoch, batches yielded in it on each rank, and their samples over all
        ranks.
        """
        # Samples are valid at any batch size and world size; batches are for people who read the
        # state.
        samples = self.position * self.batch_size * self._request.replicas
        return {"epoch": self.epoch, "batches": self.position, "samples": samples}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Resume from `state` at the next iteration; with another batch size or world size at the same
        sample.
        """
        self.epoch = int(state["epoch"])
        self._skip = int(state["samples"]) // (self.batch_size * self._request.replicas)
        # Saved after the last batch of an epoch.
        if self._batches is not None and self._skip >= len(self._batches):
            self.epoch = self.epoch + 1
            self._skip = 0
        self.position = self._skip


class _Batches(BatchSampler):
    """A BatchSampler whose next pass leaves out the first `skip` batches, without loading them."""

    skip = 0

    def __iter__(self) -> Iterator[list[int]]:
        skip, self.skip = self.skip, 0
        return islice(super().__iter__(), skip, None)


class RepeatingLoader:
    """Wraps a loader so that it never ends: a new pass begins where the last one stopped."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self._iterator: Iterator[Any] = iter(())

    def __iter__(self) -> RepeatingLoader:
        return self

    def __next__(self) -> Any:
        for _ in range(3):  # a loader that resumes at the end of an epoch gives an empty pass first
            for batch in self._iterator:
                return batch
            self._iterator = iter(self.loader)
        raise UsageError("the loader that RepeatingLoader wraps is empty")

    def __len__(self) -> int:
        return len(self.loader)


def make_loader(
    ctx: Context, dataset: Any, batch_size: int | None = None, **options: Any
) -> Loader:
    """A loader of this rank's share of `dataset`: a plugin's (hook `ds_loader`), else
    `DistributedLoader`.

    batch_size: samples per micro-batch; None: the config's.
    options: other fields of `LoaderRequest`.
    """
    options = {
        "drop_last": ctx.config.core.dataloader_drop_last,
        "collate_fn": ctx.collate_fn,
    } | options
    replicas = ctx.mesh.size("batch")
    index = ctx.mesh.index("batch")
    request = LoaderRequest(dataset, batch_size or ctx.batch.micro, replicas, index, **options)
    answer = ctx.plugins.driver("ds_loader", ctx=ctx, request=request)
    return DistributedLoader(request) if answer is None else cast("Loader", answer.value)
