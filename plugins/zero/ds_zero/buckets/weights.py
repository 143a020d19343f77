"""Where a bucket's weights are between steps: replicated, sharded, or sharded and offloaded.

One class per place. A unit of stage 3 that is gathered has its weights in the bucket's `full` as
well, see `ds_zero.gather.unit`; its shard stays where it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ds_zero.buckets.sizes import Place, Sizes

if TYPE_CHECKING:
    from ds_state_stores import StateStore
    from jaxtyping import Shaped
    from torch import Tensor

    from ds_zero.comm.hierarchy import SecondCopy
    from ds_zero.offload.placement import StatePlacement, Transfers


class Weights:
    """Replicated: the bucket's full buffer always has its memory, and the shard is a view of it."""

    sharded = False
    """Whether a rank keeps its shard only, so that weights are gathered before they are used."""

    place = Place.DEVICE
    """Where they are between steps."""

    shard: Shaped[Tensor, " shard"]
    """This rank's shard, flat."""

    parts: list[Tensor]
    """The views of `shard` that belong to each parameter; empty ones for those of other ranks."""

    evicts: StateStore | None = None
    """The store that frees the shard's memory; None where the shard always is in memory."""

    on_host: StateStore | None = None
    """The store that has the shard, in host memory or behind it; None where it is on the device."""

    second: SecondCopy | None = None
    """This rank's share of hpZ's second copy of the gathered weights."""

    _transfers: Transfers | None

    def __init__(self, mine: Tensor, slices: Sequence[slice], placement: StatePlacement) -> None:
        if self.place is not Place.DEVICE:
            self.on_host = placement.shards
        self._transfers = placement.transfers
        self.shard = self._keep(mine)
        # Views are made now: torch makes none of a tensor whose memory was freed.
        self.parts = [self.shard[s] for s in slices]

    def _keep(self, mine: Tensor) -> Tensor:
        """The shard as it is kept, from this rank's range of the full buffer."""
        return mine

    @classmethod
    def memory(cls, sizes: Sizes) -> int:
        """The bytes that a bucket of these `sizes` takes at `place`; `dscore plan` adds them up."""
        return (sizes.shard if cls.sharded else sizes.total) * sizes.weight.itemsize

    def rest(self) -> None:
        """Free what need not be in memory between steps; called once, when masters were made."""

    def in_memory(
        self, *, write: bool = False, fresh: bool = False
    ) -> contextlib.AbstractContextManager[None]:
        """Inside, `shard` is in memory, and may be changed if `write`.

        fresh: all of it will be written, so that it need not be read.
        """
        return contextlib.nullcontext()

    def write(self, values: Shaped[Tensor, " shard"]) -> None:
        """Start to make `values`, flat and maybe on the host, the shard's."""
        if self._transfers is None:
            self.shard.copy_(values)
        else:
            self._transfers.to_device(self.shard, values)

    def to_device(self, mine: Shaped[Tensor, " shard"]) -> Shaped[Tensor, " shard"]:
        """The shard on the device: itself, or a copy that is started into `mine`."""
        return self.shard

    def outdate(self) -> None:
        """The weights have changed on all ranks that have them: a second copy is not valid now."""
        if self.second is not None:
            self.second.valid = False

    @property
    def has_second(self) -> bool:
        """Whether the next gather reads the second copy instead of the shards."""
        return self.second is not None and self.second.valid

    # -- reading ahead -----------------------------------------------------------------------------

    def read_ahead(self) -> None:
        """Start to read an evicted shard, for a gather that is expected soon."""

    def forget(self) -> None:
        """Evict a shard that was read ahead and not used."""


class Sharded(Weights):
    """Sharded: the shard has memory of its own on the device."""

    sharded = True

    def _keep(self, mine: Tensor) -> Tensor:
        return mine.clone()


class HostShard(Sharded):
    """Offloaded: a store keeps the shard in host memory."""

    place = Place.HOST

    on_host: StateStore
    _transfers: Transfers

    def _keep(self, mine: Tensor) -> Tensor:
        return self.on_host.copy_in(mine)

    def write(self, values: Shaped[Tensor, " shard"]) -> None:
        """See `Weights.write`."""
        with self.in_memory(write=True, fresh=True):
            self.shard.copy_(values)

    def to_device(self, mine: Shaped[Tensor, " shard"]) -> Shaped[Tensor, " shard"]:
        """See `Weights.to_device`."""
        self._transfers.to_device(mine, self.shard)
        return mine


class EvictedShard(HostShard):
    """Offloaded: a store frees the shard's memory while nobody uses it.

    It goes from evicted to read ahead to in use and back; `acquire` and `release` count its users.
    """

    place = Place.DISK

    evicts: StateStore

    def __init__(self, mine: Tensor, slices: Sequence[slice], placement: StatePlacement) -> None:
        super().__init__(mine, slices, placement)
        self.evicts = self.on_host
        self._users = 1  # whoever builds the bucket, until `rest`
        self._ahead = False
        self._changed = True

    def rest(self) -> None:
        """See `Weights.rest`."""
        self.release()

    def acquire(self, *, fresh: bool = False) -> None:
        """Bring it into memory until `release`; calls nest.

        fresh: all of it will be written.
        """
        if not self._users and fresh and not self._ahead:
            self.evicts.allocate([self.shard])
            self.shard.zero_()  # padding is saved too, and must not depend on what was there
        elif not self._users:
            self.evicts.fetch([self.shard])
            self.evicts.wait([self.shard])
        self._ahead = False
        self._users += 1

    def release(self, *, changed: bool = False) -> None:
        """Undo one `acquire`; the last one evicts it.

        changed: whether it was written.
        """
        assert self._users > 0
        self._users -= 1
        self._changed |= changed
        if not self._users:
            self.evicts.evict([self.shard], changed=self._changed)
            self._changed = False

    @contextlib.contextmanager
    def in_memory(self, *, write: bool = False, fresh: bool = False) -> Iterator[None]:
        """See `Weights.in_memory`."""
        self.acquire(fresh=fresh)
        try:
            yield
        finally:
            self.release(changed=write)

    def to_device(self, mine: Shaped[Tensor, " shard"]) -> Shaped[Tensor, " shard"]:
        """See `Weights.to_device`."""
        self.acquire()
        # The copy runs on: the shard is evicted when it has ended.
        self._transfers.to_device(mine, self.shard, then=self.release)
        return mine

    def read_ahead(self) -> None:
        """See `Weights.read_ahead`."""
        if not self.has_second and not self._users and not self._ahead:
            self.evicts.fetch([self.shard])
            self._ahead = True

    def forget(self) -> None:
        """See `Weights.forget`."""
        if self._ahead:
            self._ahead = False
            self.evicts.wait([self.shard])
            self.evicts.evict([self.shard], changed=False)


def weights_kind(*, sharded: bool, resident: bool | None) -> type[Weights]:
    """The class of a bucket's weights; also for plans, which have no tensors.

    resident: whether the store of shards keeps them in memory; None: there is no store.
    """
    if not sharded:
        return Weights
    if resident is None:
        return Sharded
    return HostShard if resident else EvictedShard


def place_weights(
    mine: Tensor, slices: Sequence[slice], sharded: bool, placement: StatePlacement
) -> Weights:
    """Put this rank's range of a full buffer where `placement` says.

    slices: the part of each parameter in it.
    """
    store = placement.shards
    kind = weights_kind(sharded=sharded, resident=None if store is None else store.resident)
    return kind(mine, slices, placement)
