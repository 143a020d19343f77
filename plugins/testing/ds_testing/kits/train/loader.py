"""`LoaderConformance`: does a loader keep the contract of `ds_core.engine.Loader`?

Subclass it, set `config` (and `load`) to what enables your loader, and implement `samples_of`.
Data-parallel ranks are simulated by their requests, so all of it runs in one process. A
checkpointer must be installed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from ds_core.engine import DistributedLoader, Loader, LoaderRequest, RepeatingLoader, make_loader

if TYPE_CHECKING:
    from ds_core import Engine

Batches = list[list[Any]]


class _Watched(Sequence[Any]):
    """A dataset that counts what is read."""

    def __init__(self, data: Any) -> None:
        self.data = data
        self.read = 0

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: Any) -> Any:
        self.read += 1
        return self.data[index]


def watched(data: Any) -> Any:
    """`data`, which counts in ``read`` what is taken of it; a dataset that is only iterated stays
    one.
    """
    from torch.utils.data import IterableDataset

    if not isinstance(data, IterableDataset):
        return _Watched(data)
    kind = type(data)

    def __iter__(self: Any) -> Iterator[Any]:
        for sample in data:
            self.read += 1
            yield sample

    class Stream(kind):  # type: ignore[misc, valid-type, unused-ignore]
        """Of the dataset's own class, for loaders that ask for it."""

    Stream.__iter__ = __iter__
    made = Stream.__new__(Stream)
    made.__dict__.update(data.__dict__, read=0)
    return made


class LoaderConformance:
    """Subclass me; see the module's docstring."""

    config: ClassVar[Mapping[str, Any]] = {}
    """Added to the config of the engine."""
    load: ClassVar[tuple[str, ...]] = ()
    """Its ``plugins.load``."""
    micro: ClassVar[int] = 2
    """Samples per micro-batch."""
    gas: ClassVar[int] = 2
    """Micro-batches per step."""
    replicas: ClassVar[tuple[int, ...]] = (1, 2, 3)
    """Numbers of data-parallel ranks."""
    pads: ClassVar[bool] = False
    """An epoch may repeat samples, so that ranks get equally many."""
    drops: ClassVar[bool] = False
    """An epoch may leave samples out."""
    shuffles: ClassVar[bool] = True
    """Epochs differ."""

    def make_dataset(self) -> Any:
        """A dataset with at least some steps' worth of samples for the largest of `replicas`;
        called once per test.

        It may be an ``IterableDataset``.
        """
        return list(range(50))

    def all_samples(self) -> list[Any]:
        """What `samples_of` gives for the samples of `make_dataset`."""
        return list(self.make_dataset())

    def samples_of(self, batch: Any) -> list[Any]:
        """The samples in a batch, each as a hashable value that no other sample of the dataset
        has."""
        raise NotImplementedError

    # -- what the tests use ------------------------------------------------------------------------

    @pytest.fixture
    def engine(self) -> Iterator[Engine]:
        """An engine of one process under `config`, with `make_dataset` as its training data."""
        made = self.make_engine()
        yield made
        made.destroy()

    def make_engine(self) -> Engine:
        """See `engine`."""
        from torch import nn

        import ds_core
        from ds_testing.kits.train.partitioner import with_plugins

        batch = {
            "train_micro_batch_size_per_gpu": self.micro,
            "gradient_accumulation_steps": self.gas,
        }
        config = with_plugins(
            {**batch, "optimizer": {"type": "SGD"}}, dict(self.config), list(self.load)
        )
        made, *_ = ds_core.initialize(
            model=nn.Linear(1, 1), config=config, training_data=self.make_dataset()
        )
        return made

    def make_loader(
        self, engine: Engine, replicas: int = 1, index: int = 0, dataset: Any = None
    ) -> Loader:
        """The loader of one of `replicas` data-parallel ranks."""
        dataset = self.make_dataset() if dataset is None else dataset
        request = LoaderRequest(dataset, self.micro, replicas=replicas, index=index)
        answer = engine.ctx.plugins.driver("ds_loader", ctx=engine.ctx, request=request)
        loader: Loader = DistributedLoader(request) if answer is None else answer.value
        return loader

    def take(self, loader: Loader, count: int | None = None) -> Batches:
        """The samples of the rest of the epoch, batch by batch, or of the next `count` batches over
        epochs.
        """
        batches = (
            iter(loader) if count is None else itertools.islice(RepeatingLoader(loader), count)
        )
        return [self.samples_of(batch) for batch in batches]

    # -- epochs ------------------------------------------------------------------------------------

    def test_ranks_share_an_epoch(self, engine: Engine) -> None:
        """All ranks get equally many batches, and together every sample, once, as `pads` and
        `drops` allow.
        """
        every = set(self.all_samples())
        for replicas in self.replicas:
            shares = [
                self.take(self.make_loader(engine, replicas, index)) for index in range(replicas)
            ]
            assert len({len(share) for share in shares}) == 1, (
                f"{replicas} ranks get {[len(s) for s in shares]} batches"
            )
            seen = [sample for share in shares for batch in share for sample in batch]
            assert seen and set(seen) <= every
            assert self.pads or len(seen) == len(set(seen)), (
                f"{replicas} ranks: a sample comes twice in an epoch"
            )
            assert self.drops or set(seen) == every, (
                f"{replicas} ranks: a sample is missing in an epoch"
            )

    def test_epochs_are_reproducible(self, engine: Engine) -> None:
        """Two loaders give the same two epochs; the second differs from the first if it
        shuffles."""
        one = self.make_loader(engine, 2, 1)
        two = self.make_loader(engine, 2, 1)
        epochs = [self.take(one), self.take(one)]
        assert [self.take(two), self.take(two)] == epochs
        assert (epochs[0] != epochs[1]) == self.shuffles

    def test_the_global_generator_is_left_alone(self, engine: Engine) -> None:
        """A resumed run draws the same random numbers, however often a loader was started."""
        import torch

        before = torch.get_rng_state()
        self.take(self.make_loader(engine))
        assert torch.equal(torch.get_rng_state(), before)

    # -- the position ------------------------------------------------------------------------------

    def test_making_and_loading_reads_nothing(self, engine: Engine) -> None:
        """A pipeline's inner stages make a loader, give and load its state, and never iterate
        it."""
        data = watched(self.make_dataset())
        loader = self.make_loader(engine, dataset=data)
        loader.load_state_dict(loader.state_dict())
        assert data.read == 0

    def test_it_resumes_at_every_batch(self, engine: Engine) -> None:
        """From the state after any batch, another loader goes on exactly, into the next epoch."""
        from copy import deepcopy

        # Two batches more than an epoch, so that a resumed loader also has to start the next one.
        count = len(self.take(self.make_loader(engine, 2))) + 2
        wanted = self.take(self.make_loader(engine, 2), count)
        loader = self.make_loader(engine, 2)
        running = iter(RepeatingLoader(loader))
        for done in range(count):
            resumed = self.make_loader(engine, 2)
            resumed.load_state_dict(deepcopy(loader.state_dict()))
            assert self.take(resumed, count - done) == wanted[done:], (
                f"resumed after {done} batches"
            )
            assert self.samples_of(next(running)) == wanted[done], (
                "state_dict disturbs the running iteration"
            )

    def test_the_state_is_equal_on_all_ranks(self, engine: Engine) -> None:
        """A checkpoint holds one rank's state, and every rank loads it."""
        loaders = [self.make_loader(engine, 2, index) for index in range(2)]
        running = [iter(RepeatingLoader(loader)) for loader in loaders]
        for _ in range(3):
            assert loaders[0].state_dict() == loaders[1].state_dict()
            for batches in running:
                next(batches)

    def test_the_state_is_of_use_at_another_world_size(self, engine: Engine) -> None:
        """After a step of two ranks, one rank goes on with samples that were not seen."""
        ranks = [self.make_loader(engine, 2, index) for index in range(2)]
        seen = {s for loader in ranks for batch in self.take(loader, self.gas) for s in batch}
        alone = self.make_loader(engine)
        alone.load_state_dict(ranks[0].state_dict())
        rest = {s for batch in self.take(alone, 1) for s in batch}
        assert rest and (self.pads or not seen & rest)

    def test_checkpoints_have_it(self, engine: Engine, tmp_path: Path) -> None:
        """The engine's own loader goes on where a checkpoint was saved, and `make_loader` gives a
        loader too.
        """
        assert engine.training_dataloader is not None
        running = iter(RepeatingLoader(engine.training_dataloader))
        for _ in range(3):
            next(running)
        engine.save_checkpoint(str(tmp_path))
        other = self.make_engine()
        other.load_checkpoint(str(tmp_path))
        assert other.training_dataloader is not None
        assert self.take(other.training_dataloader, 2) == [
            self.samples_of(next(running)) for _ in range(2)
        ]
        other.destroy()
        assert self.take(make_loader(engine.ctx, self.make_dataset()))

    # -- what a loader may have besides ------------------------------------------------------------

    def test_its_length_is_the_number_of_batches(self, engine: Engine) -> None:
        """If it has one."""
        loader = self.make_loader(engine, 2)
        if (length := getattr(loader, "__len__", None)) is not None:
            assert length() == len(self.take(loader))

    def test_set_epoch(self, engine: Engine) -> None:
        """If it has it: the next pass is that epoch, from a position within it that was loaded."""
        loader = self.make_loader(engine)
        plain = self.make_loader(engine)
        if not hasattr(loader, "set_epoch"):
            return
        epochs = [self.take(plain) for _ in range(3)]
        # Not in order: the epoch must not depend on the passes before it.
        for epoch in (2, 0, 1):
            loader.set_epoch(epoch)
            assert self.take(loader) == epochs[epoch]
        loader.set_epoch(1)
        next(iter(loader))
        resumed = self.make_loader(engine)
        resumed.load_state_dict(loader.state_dict())
        resumed.set_epoch(1)  # type: ignore[attr-defined]
        assert self.take(resumed) == epochs[1][1:]

    def test_samples_seen(self, engine: Engine) -> None:
        """If it counts them: those of all ranks, equal on all ranks, and the engine's
        `global_samples` follow.
        """
        loaders = [self.make_loader(engine, 2, index) for index in range(2)]
        if not hasattr(loaders[0], "samples_seen"):
            return
        for count in (1, 3, 0):
            before = [loader.samples_seen for loader in loaders]  # type: ignore[attr-defined]
            taken = sum(len(batch) for loader in loaders for batch in self.take(loader, count))
            after = [loader.samples_seen for loader in loaders]  # type: ignore[attr-defined]
            assert [b - a for a, b in zip(before, after, strict=True)] == [taken, taken]
