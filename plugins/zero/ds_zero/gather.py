"""Stage 3's weights: gathered before they are needed, released when they are not.

[Note: storage] A unit's parameters are views of one buffer whose storage has size 0 while it is released. What
autograd keeps for backward (the weight, or a transposed view of it) refers to that storage, so it holds no memory and
is right again once the unit is gathered. A released parameter itself is an empty tensor, so that using it by mistake
is an error of shapes and not a read of freed memory.

[Note: double backward] A backward with ``create_graph=True`` leaves a graph that refers to weights as well, and nothing
tells when the next backward comes to those. So the weights that it used stay whole until the next one without
``create_graph`` is over, or the step.

[Note: same order] Gathers are collectives, so ranks must ask for the same units in the same order. Everything here
follows from the order of modules, which must be the same on all ranks; below a leaf module it may differ.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ds_core import comm
from ds_zero.flat import Rounded
from ds_zero.status import ZeroParamStatus
from ds_zero.trace import Trace

if TYPE_CHECKING:
    from ds_zero.config import ZeroConfig
    from ds_zero.flat import FlatBucket

__all__ = ["Gathering", "State", "Unit", "rounded_dtype"]

log = logging.getLogger("ds_zero")


class State(enum.Enum):
    """Of a unit: released -> gathering -> whole -> released."""

    RELEASED = "released"
    GATHERING = "gathering"
    WHOLE = "whole"


class Unit:
    """A bucket whose weights come and go together.

    holders: running modules that need it. kept: callers who want it whole. lent: gathered for them.
    wanted: a backward has asked for it and is not through with it.
    pinned: stays until the pass ends. leaf: of a module below which ranks may differ. exact: what was gathered last
    travelled in the weights' own dtype.
    """

    exact = True

    def __init__(self, index: int, bucket: FlatBucket, leaf: bool) -> None:
        self.index, self.bucket, self.leaf = index, bucket, leaf
        self.size = bucket.layout.total
        self.state = State.WHOLE
        self.holders = self.kept = 0
        self.lent = False
        self.wanted = self.pinned = False
        self.arrived: set[nn.Parameter] = set()
        self.first_use = -1
        self._works: list[Any] = []
        self._bytes = bucket.full.untyped_storage().nbytes()
        self._empty = [p.data.new_empty(0) for p in bucket.params]

    @torch.no_grad()
    def start(self, *, by_all_reduce: bool, dtype: torch.dtype | None = None) -> None:
        """Begin to gather. Collective over the bucket's ranks. dtype: in which weights travel, if not their own."""
        assert self.state is State.RELEASED, self.bucket.names
        bucket = self.bucket
        bucket.full.untyped_storage().resize_(self._bytes)
        self.exact = dtype is None or bucket.world == 1
        if by_all_reduce and bucket.world > 1:
            low = bucket.full if dtype is None else torch.empty_like(bucket.full, dtype=dtype)
            low.zero_()
            bucket.own(low).copy_(bucket.part)
            comm.label(bucket.about_weights)
            work = comm.all_reduce(low, group=bucket.group, async_op=True)
            self._works = [work if dtype is None else Rounded(work, low, bucket.full)]
        else:
            self._works = bucket.spread(bucket.group, gather=True, dtype=dtype)
        self.state = State.GATHERING
        self._tell(ZeroParamStatus.INFLIGHT)

    def _tell(self, status: ZeroParamStatus) -> None:
        for param in self.bucket.params:
            param.ds_status = status  # type: ignore[attr-defined]

    def complete(self) -> None:
        """Wait until it is whole, and give the parameters their values."""
        assert self.state is State.GATHERING, self.bucket.names
        for work in self._works:
            work.wait()
        self._works = []
        for param, view in zip(self.bucket.params, self.bucket.views(self.bucket.full), strict=True):
            param.data = view
        self.state = State.WHOLE
        self._tell(ZeroParamStatus.AVAILABLE)

    def refresh(self, *, by_all_reduce: bool) -> None:
        """Gather again, exactly, into the memory that the parameters are views of."""
        if self.state is State.GATHERING:
            self.complete()
        self.state = State.RELEASED
        self.start(by_all_reduce=by_all_reduce)
        self.complete()

    def release(self) -> None:
        """Give the memory back."""
        if self.state is State.GATHERING:
            self.complete()
        assert self.state is State.WHOLE, self.bucket.names
        for param, empty in zip(self.bucket.params, self._empty, strict=True):
            param.data = empty
        self.bucket.full.untyped_storage().resize_(0)
        self.state, self.wanted, self.pinned, self.lent = State.RELEASED, False, False, False
        self.arrived.clear()
        self._tell(ZeroParamStatus.NOT_AVAILABLE)

    @property
    def is_unsharded(self) -> bool:
        """Whether the parameters hold their values."""
        return self.state is State.WHOLE

    @property
    def idle(self) -> bool:
        """Whole, though nobody needs it now."""
        return self.state is State.WHOLE and not (self.holders or self.kept or self.wanted or self.pinned)


class Gathering:
    """Keeps the units that are needed whole; told by hooks what runs.

    live: elements gathered now. peak: the most there were. dtype: in which a unit's weights may travel for modules
    that run; None: in their own. Callers who keep a unit have it exact.
    """

    def __init__(
        self,
        section: ZeroConfig,
        units: Sequence[Unit],
        dtype: Callable[[Unit], torch.dtype | None] = lambda unit: None,
    ) -> None:
        self.section, self.units, self._dtype = section, list(units), dtype
        self.sizes = [u.size for u in units]
        self.live = self.peak = 0
        self.passes = 0  # those that have ended
        self.in_backward = False
        self.kept_graph = False  # by the backward under way, see [Note: double backward]
        self._traces = {True: Trace(), False: Trace()}  # by whether gradients are wanted
        self._trace = self._traces[True]
        self._opening = False
        self._clock = self._began = 0  # counts fetches in forwards; its value when the last forward began

    # -- passes ----------------------------------------------------------------------------------------------

    def open(self) -> None:
        """An outermost forward begins."""
        self._trace = self._traces[torch.is_grad_enabled()]
        self._opening = True
        self._began = self._clock
        if not self.in_backward and self._trace is self._traces[False]:
            self._trace.end()

    def close(self) -> None:
        """An outermost forward is over; without gradients nothing is needed any more."""
        if self._trace is self._traces[False]:
            self._trace.end()
            self._trace = self._traces[True]
            self.release_idle()

    def end_pass(self) -> None:
        """Backward is over (or given up): release everything."""
        self.in_backward = False
        self.passes += 1
        self._traces[True].end()
        if self.kept_graph:
            self.kept_graph = False
            self._end_uses()
            self.release_idle()
        else:
            self.release_all()

    def trail(self) -> tuple[str, ...]:
        """The modules (by a weight of theirs) that this pass has come to, in order."""
        return tuple(f"the module of {self.units[i].bucket.names[0]!r}" for i in self._trace.seen())

    def release_all(self) -> None:
        """Release every unit but those that somebody keeps; nothing may be running."""
        self._end_uses()
        for unit in self.units:
            unit.pinned = False
        self.release_idle()

    def _end_uses(self) -> None:
        for unit in self.units:
            unit.holders, unit.wanted = 0, False
            unit.arrived.clear()

    # -- for callers -----------------------------------------------------------------------------------------

    def pin(self, unit: Unit) -> None:
        """Make `unit` whole until `unkeep`, whatever runs meanwhile."""
        unit.kept += 1
        if unit.state is State.RELEASED:
            unit.lent = True
            self._start(unit, exact=True)
        elif not unit.exact:
            unit.refresh(by_all_reduce=self.section.use_all_reduce_for_fetch_params)
        if unit.state is State.GATHERING:
            unit.complete()

    def unpin(self, unit: Unit) -> None:
        """The reverse of `keep`; what was gathered for it alone goes at once."""
        unit.kept -= 1
        if unit.lent and unit.idle:
            self.release(unit)

    def refresh(self) -> None:
        """The weights have changed: gather again what somebody keeps."""
        for unit in self.units:
            if unit.kept:
                unit.refresh(by_all_reduce=self.section.use_all_reduce_for_fetch_params)

    def release_idle(self) -> None:
        """Release what was gathered ahead or kept for later."""
        for unit in self.units:
            if unit.state is State.GATHERING or unit.idle:
                self.release(unit)

    # -- units -----------------------------------------------------------------------------------------------

    def fetch(self, unit: Unit) -> None:
        """Make `unit` whole, and start gathering what is expected next."""
        if not self._trace.visit(unit.index, opening=self._opening) and self.section.log_trace_cache_warnings:
            log.warning(
                "stage 3: %s is not what came here in the last pass; nothing is gathered ahead until this pass ends",
                unit.bucket.names[0],
            )
        self._opening = False
        if not self.in_backward:
            if unit.first_use < self._began:
                unit.first_use = self._clock
            self._clock += 1
        if unit.state is State.RELEASED:
            self._make_room(unit)
            self._start(unit)
        self._prefetch()
        if unit.state is State.GATHERING:
            unit.complete()

    def _start(self, unit: Unit, *, exact: bool = False) -> None:
        dtype = None if exact else self._dtype(unit)
        unit.start(by_all_reduce=self.section.use_all_reduce_for_fetch_params, dtype=dtype)
        self.live += unit.size
        self.peak = max(self.peak, self.live)

    def _prefetch(self) -> None:
        """Gather ahead, in the order of the last pass, as far as the limits let it."""
        budget = self.section.prefetch_bucket_size
        for index in self._trace.ahead():
            unit = self.units[index]
            if unit.state is State.WHOLE:
                budget -= unit.size
            elif unit.state is State.RELEASED:
                if unit.size > budget or self.live + unit.size > self.section.max_live_parameters:
                    return
                self._start(unit)
            if unit.state is State.GATHERING:
                budget -= unit.size
            if budget <= 0:
                return

    def _make_room(self, unit: Unit) -> None:
        """Before `unit` would go over max_live_parameters, release what was only kept for later."""
        if self.live + unit.size <= self.section.max_live_parameters:
            return
        for other in self.units:
            if other.idle:
                self.release(other)

    def drop(self, unit: Unit) -> None:
        """Nobody needs `unit` now: release it unless it will soon be needed again."""
        if not unit.idle:
            return
        distance = self._trace.distance(unit.index, self.sizes)
        near = distance is not None and distance <= self.section.max_reuse_distance
        if not near or self.live > self.section.max_live_parameters:
            self.release(unit)

    def release(self, unit: Unit) -> None:
        """Release `unit`, whatever the trace says."""
        unit.release()
        self.live -= unit.size


def rounded_dtype(
    params: Sequence[nn.Parameter], own: torch.dtype, listed: Mapping[nn.Parameter, torch.dtype]
) -> torch.dtype | None:
    """The dtype in which `listed` lets all of `params` travel, where it is narrower than their own; else None."""
    wanted = {listed.get(p) for p in params}
    dtype = wanted.pop() if len(wanted) == 1 else None
    return dtype if dtype is not None and dtype.itemsize < own.itemsize else None
