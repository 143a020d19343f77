"""The conformance kit that runs a plugin's values in every layout: its row of the composition matrix.

A value is a way to switch the plugin on. In each layout it must train to the weights of one process,
as far as the plugin says, or be refused by a message that names both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
from torch import Tensor

from ds_testing.kits.layouts import runs
from ds_testing.kits.layouts.model import CutModel
from ds_testing.pool import reference, run_ranks

STEPS = 3
ROUNDING = 1e-10
"""Of fp64, as a part of the way that weights went."""


class CombinationConformance:
    """Inherit, and set `values`."""

    values: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """By name, the keys of the config that switch the plugin on in one way."""
    load: ClassVar[tuple[str, ...]] = ()
    """Modules for ``plugins.load``, where the plugin is not installed."""
    within: ClassVar[Mapping[str, float]] = {}
    """By name, how far weights may be from one process's, as a part of the way that they went: of a
    value that changes numbers by design. Others differ by rounding only."""
    optimizer: ClassVar[tuple[str, Mapping[str, Any]]] = ("AdamW", {"lr": 0.02, "eps": 0.1})
    """The name and parameters of what trains."""

    def prepare(self, name: str, params: Any) -> None:
        """Mark parameters, where the plugin reads more of them than values and gradients."""

    @pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
    def test_every_layout_trains_as_one_process_or_is_refused(self, world: int) -> None:
        """ZeRO, offload, a disk, and parameters that are cut along tp, ep and pp."""
        assert self.values, (
            "set `values`: the keys of the config that switch the plugin on, by name"
        )
        layouts = [n for n, x in runs.LAYOUTS.items() if x.world == world and runs.installed(x)]
        truth = self._train(1, ["alone"])[0]
        found = self._train(world, layouts)
        for place, name in enumerate(self.values):
            alone = truth[place][0]
            assert not isinstance(alone, str), f"{name} is refused in one process: {alone}"
            for number, layout in enumerate(layouts):
                answers = [rank[place][number] for rank in found]
                self._check(name, layout, answers, alone)

    def _train(self, world: int, layouts: list[str]) -> list[Any]:
        values = [dict(value) for value in self.values.values()]
        kind, params = self.optimizer
        arguments = [values, (kind, dict(params)), layouts, list(self.load), STEPS]
        return run_ranks(world, runs.train_values, reference(type(self)), *arguments)

    def _check(
        self, name: str, layout: str, answers: list[Any], truth: Mapping[str, Tensor]
    ) -> None:
        what = f"{name} under {layout!r}"
        refused = [answer for answer in answers if isinstance(answer, str)]
        if refused:
            assert len(refused) == len(answers), f"{what}: some ranks refuse it: {refused[0]}"
            for keys in (_keys(self.values[name]), _keys_of_layout(layout)):
                said = any(key in refused[0] for key in keys)
                assert said, f"{what}: the refusal names none of {sorted(keys)}: {refused[0]}"
            return
        begin = {n: p.detach().double() for n, p in CutModel().named_parameters()}
        allowed = max(ROUNDING, self.within.get(name, 0.0))
        for rank, weights in enumerate(answers):
            for param, weight in weights.items():
                went = float((truth[param].double() - begin[param]).norm())
                off = float((weight.double() - truth[param].double()).norm())
                assert off <= allowed * max(went, ROUNDING), (
                    f"{what}: rank {rank} has {param} off by {off / max(went, ROUNDING):.3g} of its "
                    f"way, allowed {allowed:.1e}"
                )


def _keys(config: Mapping[str, Any]) -> set[str]:
    """The names of sections and options."""
    found: set[str] = set()
    for key, value in config.items():
        found.add(key)
        if isinstance(value, Mapping):
            found |= _keys(value)
    return found


def _keys_of_layout(name: str) -> set[str]:
    layout = runs.LAYOUTS[name]
    return _keys(layout.config) | set(layout.axes) | {"dp", "ranks"}
