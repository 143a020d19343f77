"""The gathers of stage 3 in a simulated step without tensors.

They are decided by the code that trains: `GatherScheduler`, over units that only count. Modules are
assumed to run in the order in which the model registers them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ds_zero.gather.scheduler import GatherScheduler
from ds_zero.planning.buckets import SimulatedUnit

if TYPE_CHECKING:
    from ds_zero.config import ZeroConfig
    from ds_zero.gather.grouping import Gatherer


def gather_passes(
    modules: Sequence[Gatherer], units: Sequence[SimulatedUnit], section: ZeroConfig
) -> int:
    """Simulate forwards and backwards until they repeat; return the most elements gathered at a
    time.

    Afterwards each unit's `gathers` and `first_use` are those of one forward and backward.
    """
    gathering = GatherScheduler(section, units)
    simulated = _SimulatedModules(modules, units, gathering)
    # The first pass shows the scheduler the order of uses, by which the second one prefetches, as in
    # training.
    for _ in range(2):
        for unit in units:
            unit.gathers = 0
        gathering.in_backward = False
        gathering.open()
        simulated.forward()
        gathering.close()
        gathering.in_backward = True
        simulated.backward()
        gathering.end_pass()
    return gathering.peak


class _SimulatedModules:
    """Does what `GatherHooks` does when modules run; modules by their names, "" is the root."""

    def __init__(
        self,
        modules: Sequence[Gatherer],
        units: Sequence[SimulatedUnit],
        gathering: GatherScheduler,
    ) -> None:
        self._gathering = gathering

        # -- The modules.

        # What each gathers before it runs.
        unit_of = {p: u for u in units for p in u.bucket.params}
        self._units = {g.name: list(dict.fromkeys(unit_of[p] for p in g.params)) for g in modules}
        # Whether it has a parameter that is trained, itself or below.
        self._trains = {
            g.name: any(p.requires_grad for p in g.module.parameters()) for g in modules
        }
        # The modules directly below, in their order.
        self._below: dict[str, list[str]] = {}
        for gatherer in modules:
            if gatherer.name:
                self._below.setdefault(gatherer.name.rpartition(".")[0], []).append(gatherer.name)

        # -- The passes.

        # Whether what goes into the next module requires a gradient.
        self._flowing = False
        # The same before and after each module.
        self._flows: dict[str, tuple[bool, bool]] = {}
        # How often backward will still use a unit.
        self._uses: Counter[SimulatedUnit] = Counter()

    def forward(self, name: str = "") -> None:
        """Run a module and everything below it."""
        if not name:
            self._flowing = False
            self._uses.clear()
        before = self._flowing
        units = self._units.get(name, ())
        for unit in units:
            unit.uses.forward += 1
            self._gathering.fetch(unit)
        for child in self._below.get(name, ()):
            self.forward(child)
        self._flowing |= self._trains.get(name, False)
        self._flows[name] = before, self._flowing
        for unit in units:
            unit.uses.forward -= 1
            self._uses[unit] += self._flowing
            self._gathering.drop(unit)

    def backward(self, name: str = "") -> None:
        """Run its backward, from the last module below it to the first."""
        before, after = self._flows[name]
        # No gradient comes to what nothing trained precedes.
        if not after:
            return
        units = self._units.get(name, ())
        for unit in units:
            unit.uses.backward = True
            self._gathering.fetch(unit)
        for child in reversed(self._below.get(name, ())):
            self.backward(child)
        for unit in units:
            self._uses[unit] -= 1
            # A unit is released when all its gradients have come. Where some of its parameters have
            # none, the gradient of the module's input shows the end, if it has one.
            done = self._uses[unit] == 0 if unit.by_gradients else before
            if done:
                unit.uses.backward = False
                self._gathering.drop(unit)
