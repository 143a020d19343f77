"""Where an engine's micro-batches come from: the loader of its dataset, or an iterator or loader of the user's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, cast

from ds_core.errors import UsageError

if TYPE_CHECKING:
    from ds_core.context import Context
    from ds_core.data import Loader

__all__ = ["Batches", "make_loader"]


def make_loader(
    ctx: Context,
    dataset: Any,
    batch_size: int | None = None,
    *,
    route: str = "train",
    collate_fn: Callable[[list[Any]], Any] | None = None,
    num_workers: int = 0,
    pin_memory: bool = False,
    sampler: Any = None,
) -> Loader:
    """A loader of this rank's share of `dataset`: a plugin's (hook `ds_loader`), else `DistributedLoader`.

    batch_size: samples per micro-batch; None: the config's.
    """
    from ds_core.data import DistributedLoader, LoaderRequest

    request = LoaderRequest(
        dataset,
        batch_size or ctx.batch.micro,
        replicas=ctx.mesh.size("dp"),
        index=ctx.mesh.index("dp"),
        route=route,
        drop_last=ctx.config.core.dataloader_drop_last,
        collate_fn=collate_fn,
        num_workers=num_workers,
        pin_memory=pin_memory and ctx.accelerator.device_type != "cpu",
        sampler=sampler,
    )
    answer = ctx.plugins.driver("ds_loader", ctx=ctx, request=request)
    return DistributedLoader.of(request) if answer is None else cast("Loader", answer.value)


class Batches:
    """What `train_batch` without an argument reads: the iterator that was set, else the engine's own loader."""

    def __init__(self, loader: Loader | None) -> None:
        self.loader = loader
        self._seen: int | None = getattr(loader, "samples_seen", None)  # None: the loader does not count
        self._own: Iterator[Any] | None = None
        self._given: Iterator[Any] | None = None

    def set_iterator(self, iterator: Iterator[Any]) -> None:
        """Read from `iterator` from now on."""
        self._given = iterator

    def set_loader(self, loader: Iterable[Any]) -> None:
        """Read from `loader` from now on, and start it again whenever it ends."""
        from ds_core.data import RepeatingLoader

        self._given = iter(RepeatingLoader(loader))

    def set_batch_size(self, micro: int) -> None:
        """Samples per micro-batch of the engine's own loader, from its next iteration on."""
        if self.loader is not None:
            self.loader.set_batch_size(micro)  # type: ignore[attr-defined]  # see check_resizable
            self.restart()

    def check_resizable(self) -> None:
        """Raise UsageError if the loader's batches have no size that can be set."""
        if self.loader is not None and not hasattr(self.loader, "set_batch_size"):
            raise UsageError(
                f"the micro-batch size cannot be changed: {type(self.loader).__name__}, which a plugin made, has no "
                "set_batch_size"
            )

    def take_samples(self, usual: int) -> int:
        """Samples that the loader has yielded on all ranks since the last call; `usual` if it counts none."""
        if self._seen is None:
            return usual
        before, self._seen = self._seen, self.loader.samples_seen  # type: ignore[union-attr]
        return self._seen - before or usual  # other batches than the loader's were used, or another stage reads it

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
            from ds_core.data import RepeatingLoader

            self._own = iter(RepeatingLoader(self.loader))
        return self._own
