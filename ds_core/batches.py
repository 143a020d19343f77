"""Where an engine's micro-batches come from: the loader of its dataset, or an iterator or loader of the user's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from ds_core.data import DistributedLoader, RepeatingLoader
from ds_core.errors import UsageError

if TYPE_CHECKING:
    from ds_core.context import Context

__all__ = ["Batches", "make_loader"]


def make_loader(
    ctx: Context,
    dataset: Any,
    batch_size: int | None = None,
    *,
    shuffle: bool = True,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    num_workers: int = 0,
    pin_memory: bool = False,
    sampler: Any = None,
) -> DistributedLoader:
    """A loader of this rank's share of `dataset`. batch_size: samples per micro-batch; None: the config's."""
    return DistributedLoader(
        dataset,
        batch_size or ctx.batch.micro,
        replicas=ctx.mesh.size("dp"),
        index=ctx.mesh.index("dp"),
        shuffle=shuffle,
        drop_last=ctx.config.core.dataloader_drop_last,
        collate_fn=collate_fn,
        num_workers=num_workers,
        pin_memory=pin_memory and ctx.accelerator.device_type != "cpu",
        sampler=sampler,
    )


class Batches:
    """What `train_batch` without an argument reads: the iterator that was set, else the engine's own loader."""

    def __init__(self, loader: DistributedLoader | None) -> None:
        self.loader = loader
        self._own: Iterator[Any] | None = None
        self._given: Iterator[Any] | None = None

    def set_iterator(self, iterator: Iterator[Any]) -> None:
        """Read from `iterator` from now on."""
        self._given = iterator

    def set_loader(self, loader: Iterable[Any]) -> None:
        """Read from `loader` from now on, and start it again whenever it ends."""
        self._given = iter(RepeatingLoader(loader))

    def set_batch_size(self, micro: int) -> None:
        """Samples per micro-batch of the engine's own loader, from its next iteration on."""
        if self.loader is not None:
            self.loader.set_batch_size(micro)
            self.restart()

    def restart(self) -> None:
        """Iterate over the engine's own loader again, from the position that its state gives."""
        self._own = None

    def iterator(self) -> Iterator[Any]:
        """The endless iterator to read from. Raises UsageError when there is none."""
        if self._given is not None:
            return self._given
        if self.loader is None:
            raise UsageError(
                "train_batch() without an iterator needs training_data in initialize(), or set_dataiterator(); or pass "
                "an iterator"
            )
        if self._own is None:
            self._own = iter(RepeatingLoader(self.loader))
        return self._own
