"""Stage 3's gathers: units are gathered before they are needed, and released when they are not.

[Note: double backward] A backward with ``create_graph=True`` leaves a graph that refers to weights
as well, and it is unknown when the next backward needs them. So the weights that it used stay
unsharded until the end of the next backward without ``create_graph``, or the step.

[Note: same order] Gathers are collectives, so all ranks must ask for the same units in the same
order. Everything here follows from the order of modules, which must be equal on all ranks; below a
leaf module it may differ.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ds_zero.comm.collectives import WeightGather, weight_gather
from ds_zero.gather.trace import Trace
from ds_zero.gather.unit import GatherUnit, UnitState

if TYPE_CHECKING:
    from ds_zero.config import ZeroConfig

log = logging.getLogger("ds_zero")


class GatherScheduler:
    """Decides when units are gathered, prefetched and released; hooks report which modules run.

    gather_of: gives how a unit is gathered now for running modules, which may round its weights;
        None: by `exact`.
    """

    def __init__(
        self,
        section: ZeroConfig,
        units: Sequence[GatherUnit],
        gather_of: Callable[[Any], WeightGather | None] = lambda unit: None,
    ) -> None:
        self.section = section
        self.units = list(units)
        self._gather_of = gather_of
        # How callers get weights: the bits of the shards.
        self.exact = weight_gather(section)
        # Elements of shards that may be read ahead from a store; 0: no store frees their memory.
        self._window = 0
        offload = section.weights_offload
        if offload is not None and any(u.offloaded_numel for u in units):
            self._window = offload.buffer_count * offload.buffer_size
        # Elements of each unit, by its index.
        self.sizes = [u.size for u in units]

        # -- Memory.

        # Elements that are unsharded or being gathered now, and their maximum.
        self.live = 0
        self.peak = 0

        # -- The running pass.

        # How many passes have ended.
        self.passes = 0
        # Whether a backward runs.
        self.in_backward = False
        # Whether it keeps its graph, see [Note: double backward].
        self.kept_graph = False

        # -- What is expected.

        # By whether grad mode is on: an evaluation has another order than a training step.
        self._traces = {True: Trace(), False: Trace()}
        self._trace = self._traces[True]
        # Whether the next fetch is the first one of an outermost forward.
        self._opening = False
        # Counts fetches in forwards.
        self._clock = 0
        # The value of `_clock` when the last forward began.
        self._began = 0

    # -- passes ------------------------------------------------------------------------------------

    def open(self) -> None:
        """An outermost forward begins."""
        self._trace = self._traces[torch.is_grad_enabled()]
        self._opening = True
        self._began = self._clock
        # Without gradients each outermost forward is a pass of its own.
        if not self.in_backward and self._trace is self._traces[False]:
            self._trace.end()

    def close(self) -> None:
        """An outermost forward is over; without gradients nothing is needed after it."""
        if self._trace is self._traces[False]:
            self._trace.end()
            self._trace = self._traces[True]
            self.release_idle()

    def end_pass(self) -> None:
        """Backward is over, or has failed: release everything."""
        self.in_backward = False
        self.passes += 1
        self._traces[True].end()
        # What the graph needs has `rest_of_pass` set, so it is not idle and stays.
        if self.kept_graph:
            self.kept_graph = False
            self._end_uses()
            self.release_idle()
        else:
            self.release_all()

    def trails(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The modules of this pass, in order, and those of the last one with gradients.

        Each is named by one of its weights.
        """

        def named(units: list[int]) -> tuple[str, ...]:
            return tuple(f"the module of {self.units[i].name!r}" for i in units)

        return named(self._trace.seen()), named(self._traces[True].last())

    def release_all(self) -> None:
        """Release all units that are not pinned. Nothing may be running."""
        self._end_uses()
        for unit in self.units:
            unit.uses.rest_of_pass = False
        self.release_idle()

    def _end_uses(self) -> None:
        for unit in self.units:
            unit.end_uses()

    # -- for callers -------------------------------------------------------------------------------

    def pin(self, unit: GatherUnit) -> None:
        """Gather `unit` and keep it unsharded until `unpin`, whatever runs meanwhile.

        Calls nest.
        """
        self._begin_pin(unit)
        if unit.state is UnitState.GATHERING:
            unit.complete()

    def pin_all(self, at_once: int) -> None:
        """`pin` every unit; gathers of `at_once` units are under way at a time."""
        # Several gathers overlap, but all at once would need too many buffers of the collectives.
        for first in range(0, len(self.units), at_once):
            some = self.units[first : first + at_once]
            for unit in some:
                self._begin_pin(unit)
            for unit in some:
                if unit.state is UnitState.GATHERING:
                    unit.complete()

    def _begin_pin(self, unit: GatherUnit) -> None:
        unit.uses.callers += 1
        # Modules may be given rounded weights (in 8 bits, or a narrower dtype), callers may not.
        if unit.state is UnitState.SHARDED:
            unit.for_caller = True
            self._start(unit, exact=True)
        elif not unit.exact:
            unit.refresh(self.exact)

    def unpin(self, unit: GatherUnit) -> None:
        """Undo one `pin`; a unit that was gathered only for it is released at once."""
        unit.uses.callers -= 1
        # What was unsharded before the caller came is kept for reuse, as it was.
        if unit.for_caller and unit.idle:
            self.release(unit)

    def refresh(self) -> None:
        """The weights have changed: gather pinned units again."""
        for unit in self.units:
            if unit.uses.callers:
                unit.refresh(self.exact)

    def release_idle(self) -> None:
        """Release what was read ahead, prefetched or kept for reuse."""
        for unit in self.units:
            unit.forget()
            if unit.state is UnitState.GATHERING or unit.idle:
                self.release(unit)

    # -- units -------------------------------------------------------------------------------------

    def fetch(self, unit: GatherUnit) -> None:
        """Unshard `unit`, and start to gather what is expected next."""
        # Recorded whether or not it is sharded now: the order is that of uses, not of gathers.
        if (
            not self._trace.visit(unit.index, opening=self._opening)
            and self.section.log_trace_cache_warnings
        ):
            log.warning(
                "stage 3: %s does not come next in the order of the last pass; no prefetching "
                "until this pass ends",
                unit.name,
            )
        self._opening = False
        # A module that runs twice in a forward has needed its unit first at the first time.
        if not self.in_backward:
            if unit.first_use < self._began:
                unit.first_use = self._clock
            self._clock += 1
        if unit.state is UnitState.SHARDED:
            self._make_room(unit)
            self._start(unit)
        # What comes next starts before this unit is waited for, so that collectives and reads
        # overlap with it and with the module.
        if self._window:
            self._read_ahead()
        self._prefetch()
        if unit.state is UnitState.GATHERING:
            unit.complete()

    def _start(self, unit: GatherUnit, *, exact: bool = False) -> None:
        gather = self._gather_of(unit)
        unit.start(self.exact if gather is None or (exact and not gather.exact) else gather)
        self.live += unit.size
        self.peak = max(self.peak, self.live)

    def _read_ahead(self) -> None:
        """Start to read shards in the order of the last pass, as far as the window allows."""
        room = self._window
        for index in self._trace.ahead():
            unit = self.units[index]
            if unit.state is UnitState.SHARDED:
                room -= unit.offloaded_numel
                # In order: a later, smaller one must not take the place of one that is needed
                # first.
                if room < 0:
                    return
                unit.read()

    def _prefetch(self) -> None:
        """Start gathers in the order of the last pass, as far as the limits allow."""
        budget = self.section.prefetch_bucket_size
        for index in self._trace.ahead():
            unit = self.units[index]
            # What is unsharded already counts too: the bucket size says how far ahead to look.
            if unit.state is UnitState.UNSHARDED:
                budget -= unit.size
            elif unit.state is UnitState.SHARDED:
                if unit.size > budget or self.live + unit.size > self.section.max_live_parameters:
                    return
                self._start(unit)
            if unit.state is UnitState.GATHERING:
                budget -= unit.size
            if budget <= 0:
                return

    def _make_room(self, unit: GatherUnit) -> None:
        """Release what is only kept for reuse, if `unit` would exceed max_live_parameters."""
        if self.live + unit.size <= self.section.max_live_parameters:
            return
        for other in self.units:
            if other.idle:
                self.release(other)

    def drop(self, unit: GatherUnit) -> None:
        """A use of `unit` has ended: release it, unless it is in use or needed again soon."""
        if not unit.idle:
            return
        # An unknown distance (the first pass, or one that departed from the order) is a far one.
        distance = self._trace.distance(unit.index, self.sizes)
        near = distance is not None and distance <= self.section.max_reuse_distance
        if not near or self.live > self.section.max_live_parameters:
            self.release(unit)

    def release(self, unit: GatherUnit) -> None:
        """Release `unit` now."""
        unit.release()
        self.live -= unit.size


def narrower_dtype(
    params: Sequence[nn.Parameter], own: torch.dtype, listed: Mapping[nn.Parameter, torch.dtype]
) -> torch.dtype | None:
    """The dtype that `listed` allows for all of `params`; None unless it is narrower than `own`.

    own: the dtype of the parameters.
    listed: the dtype to which autocast casts a parameter anyway.
    """
    # One bucket is sent in one dtype.
    wanted = {listed.get(p) for p in params}
    dtype = wanted.pop() if len(wanted) == 1 else None
    return dtype if dtype is not None and dtype.itemsize < own.itemsize else None
