"""Masters and optimizer states in a store that frees memory.

[Note: joined] Optimizers make one tensor per state and parameter. Those of a bucket are joined into
one tensor per state, of which they become views, so that a store reads and writes few large
tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ds_run_state.states import set_optimizer_state
from ds_state_stores import StateStore, is_evicted, memory_of, owns_storage
from torch import Tensor

from ds_zero.buckets.masters import InStore
from ds_zero.buckets.records import Fragment
from ds_zero.buckets.sizes import Place
from ds_zero.reduce.bucket_grads import EvictedGrads, Grads

if TYPE_CHECKING:
    from jaxtyping import Shaped
    from torch.optim import Optimizer

    from ds_zero.buckets.flat import FlatBucket
    from ds_zero.reduce.bucket_grads import GradRules


class Evicted(InStore):
    """Masters and optimizer states in a store that frees memory: a step brings in one bucket."""

    place = Place.DISK

    _writes_evicted = True

    store: StateStore

    def __init__(
        self, bucket: FlatBucket, flat: Shaped[Tensor, " shard"], store: StateStore | None
    ) -> None:
        super().__init__(bucket, flat, store)
        self.evicts = store
        # The joined optimizer states, by name.
        self.joined: dict[str, Tensor] = {}

    def rest(self) -> None:
        """See `Masters.rest`."""
        self.store.evict([self.flat])

    @contextlib.contextmanager
    def in_memory(self) -> Iterator[None]:
        """See `Masters.in_memory`."""
        if not is_evicted(self.flat):
            yield
            return
        self.store.fetch([self.flat])
        self.store.wait([self.flat])
        try:
            yield
        finally:
            self.store.evict([self.flat])

    def publish(self, unused: Iterable[Fragment]) -> None:
        """Nothing: weights are written in the step, while masters are in memory."""

    def new_grads(self, rules: GradRules) -> Grads:
        """See `Masters.new_grads`."""
        return EvictedGrads(self.bucket, rules, self.store)

    def set_state(
        self, optimizer: Optimizer, fragment: Fragment, values: Mapping[str, Any]
    ) -> None:
        """See `Masters.set_state`; joined states are given up, and joined anew by the next step."""
        self.joined.clear()
        old = optimizer.state.get(fragment.master, {})
        gone = [v for k, v in old.items() if isinstance(v, Tensor) and (k in values or not values)]
        self.store.discard([part for v in gone for part in memory_of(v)])
        # Own storages, which the store can free.
        own = {k: v.clone() for k, v in values.items()}
        set_optimizer_state(optimizer, fragment.master, own)
        self.store.evict([v for v in own.values() if v.dim()])

    # -- in a step ---------------------------------------------------------------------------------

    def states(self, optimizer: Optimizer) -> list[Tensor]:
        """Masters and the optimizer's states of one value per element: a tensor of each storage."""
        found = {_storage(t): t for t in (self.flat, *self.joined.values())}
        for fragment in self.fragments:
            for value in optimizer.state.get(fragment.master, {}).values():
                for part in memory_of(value) if _is_moment(value, fragment.master) else ():
                    # What has no elements has nothing to free.
                    if part.numel() and (is_evicted(part) or owns_storage(part)):
                        found.setdefault(_storage(part), part)
        return list(found.values())

    @contextlib.contextmanager
    def step(
        self,
        optimizer: Optimizer,
        reduced: Sequence[Tensor],
        following: Sequence[Tensor],
        *,
        all_used: bool,
    ) -> Iterator[None]:
        """Inside, states, masters and gradients are in memory, and `following` are fetched.

        reduced: the shard of gradients.
        following: what the next bucket's step will need.
        all_used: whether the step writes every element of the weights.
        """
        store = self.store
        needed = [*reduced, *self.states(optimizer)]
        store.fetch(needed)
        shard: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self.staged is self.bucket.weights.shard:
            shard = self.bucket.weights.in_memory(write=True, fresh=all_used)
        with shard:
            store.wait(needed)
            store.fetch(following)
            yield
            store.evict(reduced, changed=False)
        self._join(optimizer)
        store.evict(self.states(optimizer))

    def _join(self, optimizer: Optimizer) -> None:
        """Move states that have memory of their own into those of the bucket; see [Note: joined].

        They are in memory.
        """
        made = {_storage(t) for t in self.joined.values()}
        for fragment in self.fragments:
            state = optimizer.state.get(fragment.master, {})
            for key, value in state.items():
                moment = _is_moment(value, fragment.master)
                # A wrapper has no memory of its own.
                own = moment and memory_of(value)[0] is value and owns_storage(value)
                if not own or _storage(value) in made:
                    continue
                joined = self.joined.get(key)
                if joined is None:
                    joined = self.store.buffer(self.flat.numel(), value.dtype).zero_()
                    self.joined[key] = joined
                    made.add(_storage(joined))
                if joined.dtype == value.dtype:
                    state[key] = joined[fragment.within].view(value.shape).copy_(value)
                    self.store.discard([value])


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _is_moment(value: Any, master: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == master.shape and value.numel() > 0
