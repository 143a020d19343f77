"""This rank's shard of a bucket's weights, at rest in a store that frees memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ds_state_stores import StateStore
    from torch import Tensor


class AwayShard:
    """Brings `shard` into memory and evicts it again.

    A shard that is read ahead stays until it was used or `forget`.
    """

    def __init__(self, store: StateStore, shard: Tensor) -> None:
        self._store = store
        self._shard = [shard]
        self._users = 0
        self._ahead = self._changed = False
        store.evict(self._shard)

    @property
    def numel(self) -> int:
        """Its elements."""
        return self._shard[0].numel()

    def read(self) -> None:
        """Start to read it, for a `hold` that is expected soon."""
        if not self._users and not self._ahead:
            self._store.fetch(self._shard)
            self._ahead = True

    def hold(self, *, fresh: bool = False) -> None:
        """Bring it into memory until `drop`.

        Calls nest. fresh: all of it will be written; it may be zeros.
        """
        if not self._users and fresh and not self._ahead:
            self._store.allocate(self._shard)
            self._shard[0].zero_()
        elif not self._users:
            self._store.fetch(self._shard)
            self._store.wait(self._shard)
        self._ahead = False
        self._users += 1

    def drop(self, *, changed: bool = False) -> None:
        """Undo one `hold`; the last one evicts it. changed: whether it was written."""
        self._users -= 1
        self._changed |= changed
        if not self._users:
            self._store.evict(self._shard, changed=self._changed)
            self._changed = False

    def forget(self) -> None:
        """Evict it if it was read ahead and not used."""
        if self._ahead:
            self._ahead = False
            self._store.wait(self._shard)
            self._store.evict(self._shard, changed=False)

    @contextlib.contextmanager
    def here(self, *, write: bool, fresh: bool = False) -> Iterator[None]:
        """Inside, it is in memory, and may be changed if `write`. fresh: all of it will be
        written."""
        self.hold(fresh=fresh)
        try:
            yield
        finally:
            self.drop(changed=write)
