"""A unit of stage 3's weights: a bucket that is gathered and released as one.

[Note: storage] A unit's parameters are views of one buffer whose storage has size 0 while the unit
is sharded. What autograd saves for backward (the weight, or a transposed view of it) refers to that
storage, so it takes no memory, and is right again once the unit is gathered. A sharded parameter
itself is an empty tensor, so that using it by mistake is a shape error and not a read of freed
memory.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ds_zero.init.status import ZeroParamStatus

if TYPE_CHECKING:
    from ds_zero.buckets.flat import FlatBucket
    from ds_zero.comm.collectives import WeightGather


class UnitState(enum.Enum):
    """A unit goes from SHARDED to GATHERING to UNSHARDED and back."""

    SHARDED = "sharded"
    GATHERING = "gathering"
    UNSHARDED = "unsharded"


@dataclass
class Uses:
    """Reference counts of a unit by reason: while any is set, it has to be unsharded."""

    # How many modules with it have a forward that runs.
    forward: int = 0
    # Whether backward has reached a module of the unit, and has not used it yet.
    backward: bool = False
    # Whether it is needed until the pass ends.
    rest_of_pass: bool = False
    # How often callers have pinned it.
    callers: int = 0

    def __bool__(self) -> bool:
        return bool(self.forward or self.backward or self.rest_of_pass or self.callers)


class GatherUnit(ABC):
    """State and reference counts of a unit; subclasses move the data."""

    offloaded_numel = 0
    """Elements of this rank's shard, where it is in a store that frees memory; else 0."""

    def __init__(
        self, index: int, size: int, leaf: bool, name: str, params: Sequence[nn.Parameter]
    ) -> None:
        # Its place among the units of the model.
        self.index = index
        # Elements, padding included.
        self.size = size
        # Whether it belongs to a leaf module, below which ranks may run different modules.
        self.leaf = leaf
        # One of its parameters, for messages.
        self.name = name
        self.params = params

        # -- What it is now, and why.

        self.state = UnitState.SHARDED
        self.uses = Uses()
        # Whether the last gather gave the bits of the shards.
        self.exact = True
        # Whether it was gathered for a caller only.
        self.for_caller = False

        # -- What the pass has done.

        # The parameters whose gradient this backward has computed.
        self.arrived: set[nn.Parameter] = set()
        # When the last forward first needed it, as a count of fetches; -1: never.
        self.first_use = -1

    @abstractmethod
    def _begin(self, gather: WeightGather) -> None:
        """Start the collectives."""

    @abstractmethod
    def _finish(self) -> None:
        """Wait for the collectives, and give the parameters their values."""

    @abstractmethod
    def _free(self) -> None:
        """Free the memory of the unsharded weights."""

    def read(self) -> None:  # noqa: B027
        """Start to read the shard from the store that has it, for a gather that is expected."""

    def forget(self) -> None:  # noqa: B027
        """Free the shard's memory, where it was read and not gathered."""

    def _expect(self, state: UnitState) -> None:
        assert self.state is state, f"{self.name} is {self.state.value}, not {state.value}"

    @torch.no_grad()
    def start(self, gather: WeightGather) -> None:
        """Begin to gather. Collective over the bucket's ranks."""
        self._expect(UnitState.SHARDED)
        self._begin(gather)
        self.state = UnitState.GATHERING

    def complete(self) -> None:
        """Wait until the gather that was started is over."""
        self._expect(UnitState.GATHERING)
        self._finish()
        self.state = UnitState.UNSHARDED

    def refresh(self, gather: WeightGather) -> None:
        """Gather again, exactly, into the memory of which the parameters are views."""
        # Two gathers into the same memory must not run at once.
        if self.state is UnitState.GATHERING:
            self.complete()
        # Nothing is freed: views of the weights that others have stay valid.
        self.state = UnitState.SHARDED
        self.start(gather)
        self.complete()

    def release(self) -> None:
        """Free the unsharded weights.

        Only uses that outlive this (forward's and callers' counts) are kept.
        """
        # Memory that a collective still writes to cannot be freed.
        if self.state is UnitState.GATHERING:
            self.complete()
        self._expect(UnitState.UNSHARDED)
        self._free()
        self.state = UnitState.SHARDED
        self.uses.backward = self.uses.rest_of_pass = False
        self.for_caller = False
        self.arrived.clear()

    def end_uses(self) -> None:
        """Nothing runs any more: forget uses by forward and backward."""
        self.uses.forward = 0
        self.uses.backward = False
        self.arrived.clear()

    @property
    def by_gradients(self) -> bool:
        """Whether the gradients of its parameters show the end of its use in backward.

        Frozen ones get none, and of a leaf's some may not be used.
        """
        return not self.leaf and all(p.requires_grad for p in self.params)

    @property
    def is_unsharded(self) -> bool:
        """Whether the parameters have their values."""
        return self.state is UnitState.UNSHARDED

    @property
    def idle(self) -> bool:
        """Whether it is unsharded without a use."""
        return self.state is UnitState.UNSHARDED and not self.uses


class BucketUnit(GatherUnit):
    """A unit whose weights are those of `bucket`. See [Note: storage]."""

    def __init__(self, index: int, bucket: FlatBucket, leaf: bool) -> None:
        super().__init__(index, bucket.layout.total, leaf, bucket.names[0], bucket.params)
        self.bucket = bucket
        # The collectives that run.
        self._works: list[Any] = []
        # Of the storage, when it has its memory.
        self._bytes = bucket.full.untyped_storage().nbytes()
        # What each parameter is while it is sharded; made once, and not at each release.
        self._empty = [p.data.new_empty(0) for p in bucket.params]
        self._free()
        self.offloaded_numel = 0 if bucket.weights.evicts is None else bucket.layout.shard_numel

    def read(self) -> None:
        """See `GatherUnit.read`."""
        self.bucket.weights.read_ahead()

    def forget(self) -> None:
        """See `GatherUnit.forget`."""
        self.bucket.weights.forget()

    def _begin(self, gather: WeightGather) -> None:
        bucket = self.bucket
        # The same storage gets its memory back, see [Note: storage].
        bucket.full.untyped_storage().resize_(self._bytes)
        # One rank has all weights, and sends none.
        self.exact = gather.exact or bucket.world == 1
        self._works = bucket.start_gather(gather)
        self._set_status(ZeroParamStatus.INFLIGHT)

    def _finish(self) -> None:
        for work in self._works:
            work.wait()
        self._works = []
        for param, view in zip(
            self.bucket.params, self.bucket.views(self.bucket.full), strict=True
        ):
            param.data = view
        self._set_status(ZeroParamStatus.AVAILABLE)

    def _free(self) -> None:
        # The parameters first: none may be a view of a storage without memory.
        for param, empty in zip(self.bucket.params, self._empty, strict=True):
            param.data = empty
        self.bucket.full.untyped_storage().resize_(0)
        self._set_status(ZeroParamStatus.NOT_AVAILABLE)

    def _set_status(self, status: ZeroParamStatus) -> None:
        for param in self.bucket.params:
            param.ds_status = status  # type: ignore[attr-defined]
