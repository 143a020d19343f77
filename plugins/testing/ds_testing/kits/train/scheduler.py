"""The conformance kit for learning-rate schedules that a plugin offers by `ds_schedulers`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from ds_core.entries import SchedulerEntry, resolve
from ds_testing.one_process import one_process_engine

STEPS = 25


class SchedulerConformance:
    """Inherit, and set `plugin` to the reference of your declaration module."""

    plugin: str = ""
    names: ClassVar[tuple[str, ...] | None] = None
    """Those to test; by default all that it offers."""
    params: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """By name, the ``scheduler.params`` to test with; choose them so that the learning rate changes
    within 25 steps.
    """
    load: ClassVar[tuple[str, ...]] = ()
    """Modules for ``plugins.load``, where the plugin is not installed."""

    def entries(self) -> dict[str, SchedulerEntry]:
        """The entries to test, by name."""
        offered: Mapping[str, SchedulerEntry] = resolve(self.plugin).ds_schedulers()
        found = {n: e for n, e in offered.items() if self.names is None or n in self.names}
        assert found, f"{self.plugin} offers no schedule of {self.names or 'any name'}"
        return found

    def make(self, name: str, optimizer: Any) -> Any:
        """The schedule `name` for `optimizer`, as the core makes it."""
        entry = self.entries()[name]
        given = dict(self.params.get(name, {}))
        if entry.params is not None:
            given = resolve(entry.params).model_validate(given).model_dump()
        return resolve(entry.load)(optimizer, **given)

    def optimizer(self) -> Any:
        """An optimizer with two groups, for a schedule to write to."""
        params = [nn.Parameter(torch.ones(2)) for _ in range(2)]
        return torch.optim.AdamW([{"params": [p]} for p in params], lr=0.1)

    def rates(self, schedule: Any, optimizer: Any, steps: int) -> list[list[float]]:
        """The learning rates of all groups before each of `steps` steps."""
        found = []
        for _ in range(steps):
            found.append([float(g["lr"]) for g in optimizer.param_groups])
            optimizer.step()
            schedule.step()
        return found

    def test_rates_are_finite_and_change(self) -> None:
        """``step()`` goes without arguments, and writes a finite rate that is not negative into
        every group.
        """
        for name in self.entries():
            optimizer = self.optimizer()
            rates = self.rates(self.make(name, optimizer), optimizer, STEPS)
            for step, groups in enumerate(rates):
                assert all(math.isfinite(r) and r >= 0 for r in groups), (
                    f"{name}: rates in step {step} are {groups}"
                )
            for group in range(2):
                seen = {groups[group] for groups in rates}
                assert len(seen) > 1, (
                    f"{name}: the rate of group {group} is {rates[0][group]} in all {STEPS} steps"
                )

    def test_it_only_writes_to_groups(self) -> None:
        """Parameters keep their values and gradients."""
        for name in self.entries():
            optimizer = self.optimizer()
            params = [p for g in optimizer.param_groups for p in g["params"]]
            self.rates(self.make(name, optimizer), optimizer, 3)
            assert all(torch.equal(p, torch.ones(2)) and p.grad is None for p in params), (
                f"{name}: parameters changed"
            )

    def test_a_saved_schedule_goes_on(self) -> None:
        """`state_dict` is JSON, and a new schedule that loads it, with its optimizer's, gives the
        same rates.
        """
        for name in self.entries():
            for done in (0, 1, STEPS // 2):
                optimizer = self.optimizer()
                schedule = self.make(name, optimizer)
                self.rates(schedule, optimizer, done)
                state = schedule.state_dict()
                try:
                    saved = json.loads(json.dumps(state))
                except TypeError as error:
                    raise AssertionError(f"{name}: state_dict() is not JSON: {error}") from error
                other = self.optimizer()
                resumed = self.make(name, other)
                other.load_state_dict(optimizer.state_dict())
                resumed.load_state_dict(saved)
                expected = self.rates(schedule, optimizer, STEPS)
                got = self.rates(resumed, other, STEPS)
                assert got == expected, (
                    f"{name}: after {done} steps, a schedule that was loaded gives other rates"
                )

    def test_the_engine_steps_it_once_per_step(self) -> None:
        """The config names it; the engine's rates are those of stepping by hand."""
        for name in self.entries():
            config = {
                "train_micro_batch_size_per_gpu": 2,
                "gradient_accumulation_steps": 2,
                "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
                "scheduler": {"type": name, "params": dict(self.params.get(name, {}))},
                "plugins": {"load": list(self.load)},
            }
            optimizer = self.optimizer()
            got = []
            with one_process_engine(nn.Linear(2, 1), config) as engine:
                for micro in range(10):
                    if micro % 2 == 0:
                        got.append(float(engine.optimizer.param_groups[0]["lr"]))
                    engine.backward(engine(torch.ones(2, 2)).sum())
                    engine.step()
            expected = [row[0] for row in self.rates(self.make(name, optimizer), optimizer, 5)]
            assert got == expected, f"{name}: rates in the engine are {got}, by hand {expected}"
