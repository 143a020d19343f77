"""The gradients of one bucket: this rank's own, and its shard of the reduced ones."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from ds_state_stores import is_evicted
from torch import Tensor

if TYPE_CHECKING:
    from ds_zero.buckets.flat import FlatBucket
    from ds_zero.offload.placement import Copy


class Grads:
    """The gradients of one bucket.

    local: this rank's, not reduced yet, in the layout of the bucket; filled: which parameters it
    has. shard: this rank's shard of the reduced gradients; None: nothing was reduced yet. buffer:
    the buffer of which `shard` is a view, if any. host: memory for the shard if the host does the
    optimizer's step. used: which parameters had a gradient since the last step. norm: of the shard,
    where a store frees its memory; parts: its views by piece. copied: the last copy to `host`, if
    any; any thread may wait for it.
    """

    def __init__(self, bucket: FlatBucket, squares: Callable[[list[Tensor]], Tensor]) -> None:
        self.bucket = bucket
        self._squares = squares
        self.norm: Tensor | None = None
        self.parts: list[Tensor] = []
        count = len(bucket.params)
        self.local: Tensor | None = None
        self.filled = [False] * count
        self.used = [False] * count
        self.shard: Tensor | None = None
        self.buffer: Tensor | None = None
        self.host: Tensor | None = None
        self.copied: Copy | None = None
        self.arrived: set[int] = set()
        self.awaited = count

    def add_to_host(self, out: Tensor, accumulate: torch.dtype | None, *, once: bool) -> None:
        """Start to add the device's `out` to the shard, which is on the host.

        accumulate: the shard's dtype; None: that of masters, or of `out` if it is the only one
        (`once`).
        """
        placement = self.bucket.placement
        first = self.shard is None
        assert placement.masters is not None and placement.transfers is not None
        wide = accumulate or self.bucket.master.dtype
        if first:
            self._use_host(out.dtype if once and accumulate is None else wide)
        else:
            self.bring()
        if not first and self.shard is not None and self.shard.dtype != wide:
            placement.transfers.synchronize()
            narrow = self.shard
            self._use_host(wide)
            self.shard.copy_(narrow)
        assert self.shard is not None
        then = self.leave if self.bucket.evictable else None
        self.copied = placement.transfers.to_host(self.shard, out, add=not first, then=then)

    def _use_host(self, dtype: torch.dtype) -> None:
        """Make `host` the shard, with any values; memory of a wider dtype is reused."""
        store = self.bucket.placement.masters
        assert store is not None
        if self.host is None or self.host.dtype.itemsize < dtype.itemsize:
            self.host = store.buffer(self.bucket.layout.shard_numel, dtype)
            self.parts = [self.host[p.within] for p in self.bucket.pieces]
        elif is_evicted(self.host):
            store.allocate([self.host])
        self.shard = self.host

    # -- in a store that frees memory --------------------------------------------------------------

    def expect(self) -> None:
        """Start to read the shard, if it is evicted, since something will be added to it."""
        if self.evicted is not None:
            assert self.bucket.placement.masters is not None
            self.bucket.placement.masters.fetch([self.evicted])

    def bring(self) -> None:
        """Have the shard in memory."""
        if self.bucket.evictable and self.copied is not None:
            self.copied.finish()
        if (shard := self.evicted) is not None:
            assert self.bucket.placement.masters is not None
            self.bucket.placement.masters.fetch([shard])
            self.bucket.placement.masters.wait([shard])

    @torch.no_grad()
    def leave(self) -> None:
        """Evict the shard, which is complete for now; its norm is taken before, so that nobody
        reads it for that.
        """
        assert self.shard is not None and self.bucket.placement.masters is not None
        self.norm = self._squares([self.shard]).double().sqrt().view(1)
        self.bucket.placement.masters.evict([self.shard])

    @contextlib.contextmanager
    def here(self) -> Iterator[None]:
        """Inside, the shard is in memory and may be changed."""
        self.bring()
        yield
        if self.bucket.evictable:
            self.leave()

    @property
    def evicted(self) -> Tensor | None:
        """The shard, if a store has freed its memory; `offload_states` does so too, and that is not
        meant.
        """
        gone = self.bucket.evictable and self.shard is not None and is_evicted(self.shard)
        return self.shard if gone else None

    def begin_shard(self, dtype: torch.dtype, accumulate: torch.dtype | None) -> None:
        """Begin the shard with zeros, before anything was reduced."""
        if self.bucket.stepped_on_host:
            self._use_host(accumulate or self.bucket.master.dtype)
            assert self.shard is not None
            self.shard.zero_()
        else:
            self.shard = torch.zeros(
                self.bucket.layout.shard_numel, dtype=dtype, device=self.bucket.full.device
            )

    def drop(self) -> None:
        """Forget all gradients."""
        if self.bucket.evictable and self.shard is not None and not is_evicted(self.shard):
            assert self.bucket.placement.masters is not None
            self.bucket.placement.masters.evict([self.shard], changed=False)
        self.local = self.shard = self.buffer = self.copied = self.norm = None
