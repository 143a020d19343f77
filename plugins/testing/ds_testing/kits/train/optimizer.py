"""The conformance kit for optimizers that a plugin offers by `ds_optimizers`.

It checks what the core and partitioners rely on: missing gradients, the declared grain, the
learning rate of the group, states in ``state_dict``, `StepInputs`, training by the engine as by a
plain loop, and training under every layout as in one process.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ds_core.entries import OptimizerEntry, resolve
from ds_core.partition import StepInputs
from ds_testing.kits.layouts import runs
from ds_testing.one_process import one_process_engine
from ds_testing.pool import reference, run_ranks
from ds_testing.truth import relative

ROWS = 6
COLUMNS = 4
STEPS = 3


class OptimizerConformance:
    """Inherit, and set `plugin` to the reference of your declaration module."""

    plugin: str = ""
    names: ClassVar[tuple[str, ...] | None] = None
    """Those to test; by default all that it offers."""
    params: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """By name, the ``optimizer.params`` to test with; add what an optimizer cannot do without."""
    load: ClassVar[tuple[str, ...]] = ()
    """Modules for ``plugins.load``, where the plugin is not installed."""
    over_ranks: ClassVar[tuple[str, ...] | None] = None
    """Those to train under every layout; by default all of `names`."""

    def entries(self) -> dict[str, OptimizerEntry]:
        """The entries to test, by name."""
        offered: Mapping[str, OptimizerEntry] = resolve(self.plugin).ds_optimizers()
        found = {n: e for n, e in offered.items() if self.names is None or n in self.names}
        assert found, f"{self.plugin} offers no optimizer of {self.names or 'any name'}"
        return found

    def prepare(self, name: str, params: Iterable[Tensor]) -> None:
        """Mark parameters, where the optimizer `name` reads more of them than values and
        gradients."""

    def make(self, name: str, params: Iterable[Tensor] | Mapping[str, Tensor]) -> Optimizer:
        """The optimizer `name` of one group of `params`, as the core makes it.

        params: with their names, or without.
        """
        if not isinstance(params, Mapping):
            params = {f"weight{i}": p for i, p in enumerate(params)}
        entry = self.entries()[name]
        given = dict(self.params.get(name, {}))
        if entry.params is not None:
            given = resolve(entry.params).model_validate(given).model_dump()
        groups: Any = [{"params": list(params.values())}]
        self.prepare(name, groups[0]["params"])
        if entry.groups is not None:
            groups = resolve(entry.groups)(groups, {p: n for n, p in params.items()}, **given)
        made = resolve(entry.load)(groups, **given)
        assert isinstance(made, Optimizer), (
            f"{name}: {entry.load} gave a {type(made).__name__}, not an Optimizer"
        )
        return made

    def test_a_step_updates_what_has_a_gradient_and_nothing_else(self) -> None:
        """``step()`` goes without arguments; a parameter whose gradient is None keeps its values,
        and gradients too.
        """
        for name in self.entries():
            params = _params(3)
            before = [p.detach().clone() for p in params]
            optimizer = self.make(name, params)
            grads: list[Tensor] = []
            for step in range(STEPS):  # the first one may only set up states
                _give(params[:2], step)
                grads = [p.grad.clone() for p in params[:2] if p.grad is not None]
                optimizer.step()
            for place in (0, 1):
                assert not torch.equal(params[place], before[place]), (
                    f"{name}: parameter {place} was not updated"
                )
                assert torch.isfinite(params[place]).all(), (
                    f"{name}: parameter {place} is not finite"
                )
            assert torch.equal(params[2], before[2]), (
                f"{name}: a parameter without a gradient was changed"
            )
            assert all(
                torch.equal(p.grad, g)
                for p, g in zip(params, grads, strict=False)
                if p.grad is not None
            ), f"{name}: the step changed gradients"

    def test_the_groups_learning_rate_is_read_in_each_step(self) -> None:
        """Every group has ``lr``, which schedules write and logs read; with 0 nothing moves."""
        for name in self.entries():
            params = _params(1)
            optimizer = self.make(name, params)
            _give(params, 0)
            optimizer.step()
            before = params[0].detach().clone()
            for group in optimizer.param_groups:
                assert "lr" in group, f"{name}: a parameter group has no 'lr'"
                group["lr"] = 0.0
            _give(params, 1)
            optimizer.step()
            assert torch.equal(params[0], before), f"{name}: a step with lr 0 changed a parameter"

    def test_the_grain_is_true(self) -> None:
        """Updating parts of the size of the declared grain, each by an optimizer of its own, gives
        the same.
        """
        for name, entry in self.entries().items():
            whole = _params(2)
            parts = _params(2)
            if entry.grain == "element":  # the rows of both, in two optimizers
                views = [
                    [nn.Parameter(p.detach()[rows].clone()) for p in parts]
                    for rows in (slice(0, 2), slice(2, None))
                ]
            else:
                views = [[p] for p in parts]
            optimizer = self.make(name, whole)
            others = [self.make(name, members) for members in views]
            for step in range(STEPS):
                _give(whole, step)
                for place, members in enumerate(views):
                    for index, member in enumerate(members):
                        grad = whole[index if entry.grain == "element" else place].grad
                        assert grad is not None
                        rows = (
                            (slice(0, 2), slice(2, None))[place]
                            if entry.grain == "element"
                            else slice(None)
                        )
                        member.grad = grad[rows].clone()
                optimizer.step()
                for other in others:
                    other.step()
            joined = (
                [torch.cat(ps) for ps in zip(*views, strict=True)]
                if entry.grain == "element"
                else parts
            )
            for a, b in zip(whole, joined, strict=True):
                off = float((a - b).abs().max().detach())
                assert off < 1e-12, (
                    f"{name} declares grain {entry.grain!r}, but its parts are off by {off:.2g}"
                )

    def test_states_are_in_the_state_dict(self) -> None:
        """A new optimizer that loads ``state_dict()`` goes on bit for bit; states are tensors by
        parameter.
        """
        for name in self.entries():
            params = _params(2)
            optimizer = self.make(name, params)
            for step in range(STEPS):
                _give(params, step)
                optimizer.step()
            again = [nn.Parameter(p.detach().clone()) for p in params]
            other = self.make(name, again)
            other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            for step in range(STEPS, 2 * STEPS):
                _give(params, step)
                _give(again, step)
                optimizer.step()
                other.step()
            for a, b in zip(params, again, strict=True):
                assert torch.equal(a, b), (
                    f"{name}: an optimizer with the loaded state_dict() steps differently"
                )

    def test_step_inputs_are_heeded(self) -> None:
        """One that `takes_inputs` multiplies gradients by the scale, and writes 16-bit copies; see
        `StepInputs`.
        """
        for name in self.entries():
            mine = _params(2, torch.float32)
            theirs = _params(2, torch.float32)
            optimizer: Any = self.make(name, mine)
            other = self.make(name, theirs)
            if not getattr(optimizer, "takes_inputs", False):
                continue
            copies = [torch.zeros_like(p, dtype=torch.bfloat16) for p in mine]
            for step in range(STEPS):
                _give(theirs, step)
                grads = [p.grad.bfloat16() for p in theirs if p.grad is not None]
                for p, grad in zip(theirs, grads, strict=True):
                    p.grad = grad.float() * 0.5
                optimizer.step(inputs=StepInputs(0.5, grads, copies))
                other.step()
            for a, b, c in zip(mine, theirs, copies, strict=True):
                torch.testing.assert_close(
                    a, b, rtol=1e-5, atol=1e-6, msg=f"{name}: a step with inputs differs"
                )
                assert torch.equal(c, a.detach().bfloat16()), (
                    f"{name}: copies are not the new parameters"
                )

    def test_the_engine_trains_as_a_plain_loop_does(self) -> None:
        """The config names it; one process, fp32; the same losses."""
        for name in self.entries():
            engine_model = _model()
            model = _model()
            self.prepare(name, engine_model.parameters())
            config = {
                "train_micro_batch_size_per_gpu": 5,
                "optimizer": {"type": name, "params": dict(self.params.get(name, {}))},
                "plugins": {"load": list(self.load)},
            }
            optimizer = self.make(name, model.parameters())
            batch = _batch()
            with one_process_engine(engine_model, config) as engine:
                for _ in range(STEPS):
                    loss = engine(batch).square().mean()
                    plain = model(batch).square().mean()
                    off = abs(loss.item() - plain.item())
                    assert off < 1e-6, (
                        f"{name}: the engine's loss is {loss}, the plain loop's {plain}"
                    )
                    engine.backward(loss)
                    plain.backward()
                    engine.step()
                    optimizer.step()
                    optimizer.zero_grad()

    # -- over ranks --------------------------------------------------------------------------------

    def _wanted(self) -> dict[str, OptimizerEntry]:
        """Those to run under layouts: what reduces gradients by itself promises no equality."""
        return {
            name: entry
            for name, entry in self.entries().items()
            if entry.partitioner is None and (self.over_ranks is None or name in self.over_ranks)
        }

    def _over(self, world: int, function: Any, *arguments: Any) -> list[Any]:
        wanted = [(name, dict(self.params.get(name, {}))) for name in self._wanted()]
        if not wanted:
            pytest.skip("no optimizer of these is to be run over ranks")
        return run_ranks(world, function, reference(type(self)), wanted, *arguments)

    @pytest.mark.parametrize("dtype", ["float64", pytest.param("float32", marks=pytest.mark.slow)])
    @pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
    def test_every_layout_trains_as_one_process(self, world: int, dtype: str) -> None:
        """ZeRO, offload, and parameters that are cut along tp, ep and pp: the weights of one
        process.

        One that neither declares the grain of elements nor collects is refused where ranks have
        parts of what it needs whole. One that cannot be updated in parts may be refused where
        states are on a disk.
        """
        layouts = [n for n, x in runs.LAYOUTS.items() if x.world == world and runs.installed(x)]
        found = self._over(world, runs.train_all, layouts, dtype, list(self.load), STEPS)
        for place, name in enumerate(self._wanted()):
            truth, allowed = self._truth(name, dtype, STEPS)
            for number, layout in enumerate(layouts):
                answers = [rank[place][number] for rank in found]
                self._check(f"{name} under {layout!r}, {dtype}", answers, truth, allowed, layout)

    @pytest.mark.parametrize(
        "route",
        [
            pytest.param(route, marks=() if place == 0 else pytest.mark.slow, id=" to ".join(route))
            for place, route in enumerate(runs.ROUTES)
        ],
    )
    def test_a_checkpoint_is_resumed_in_another_layout(
        self, route: tuple[str, str], tmp_path: Path
    ) -> None:
        """Two steps, and two more in another layout, are four of one process."""
        first, then = (runs.LAYOUTS[layout] for layout in route)
        if not (runs.installed(first) and runs.installed(then)):
            pytest.skip("dscore-zero is not installed")
        where = [list(self.load), str(tmp_path)]
        saved = self._over(first.world, runs.save_all, route[0], *where, 2)
        found = self._over(then.world, runs.resume_all, route[1], *where, [2, 3])
        for place, name in enumerate(self._wanted()):
            if self._refused(name, route[0]):
                continue
            if self._may_refuse(name, route[0], saved[0][place]):
                continue
            assert all(rank[place] is None for rank in saved), f"{name}: {saved[0][place]}"
            truth, allowed = self._truth(name, "float64", 4)
            what = f"{name}, saved under {route[0]!r} and resumed under {route[1]!r}"
            self._check(what, [rank[place] for rank in found], truth, allowed, route[1])

    def _truth(self, name: str, dtype: str, steps: int) -> tuple[dict[str, Tensor], float]:
        """The weights of one process, and how far others may be from them.

        That is 1e-10 in fp64 and 1e-6 in fp32, or some times what rounding does to this process
        itself: an optimizer may enlarge it.
        """

        def make(params: Any) -> Optimizer:
            return self.make(name, params)

        truth = runs.train_alone(make, dtype, steps)
        if dtype == "float64":
            other = runs.train_alone(make, dtype, steps, nudge=1e-16)
            return truth, max(1e-10, 30 * _worst(other, truth))
        return truth, max(1e-6, 3 * _worst(truth, runs.train_alone(make, "float64", steps)))

    def _refused(self, name: str, layout: str) -> bool:
        entry = self.entries()[name]
        needs_more = entry.grain != "element" and not entry.collects
        return needs_more and not runs.LAYOUTS[layout].axes.keys() <= {"pp"}

    def _may_refuse(self, name: str, layout: str, answer: Any) -> bool:
        """Whether the answer is that states must stay in memory, of one that may say so."""
        says = isinstance(answer, str) and "offload_optimizer" in answer
        in_parts = hasattr(resolve(self.entries()[name].load), "step_in_parts")
        return says and runs.LAYOUTS[layout].on_disk and not in_parts

    def _check(
        self, what: str, answers: list[Any], truth: Any, allowed: float, layout: str
    ) -> None:
        refused = self._refused(what.split()[0].rstrip(","), layout)
        for rank, weights in enumerate(answers):
            if refused:
                assert isinstance(weights, str), f"{what}: it must be refused, but rank {rank} runs"
                continue
            if self._may_refuse(what.split()[0].rstrip(","), layout, weights):
                continue
            assert not isinstance(weights, str), f"{what}: rank {rank} refuses: {weights}"
            off = {n: relative(w, truth[n]) for n, w in weights.items()}
            worst = max(off, key=off.__getitem__)
            assert off[worst] <= allowed, (
                f"{what}: rank {rank} has {worst} off by {off[worst]:.3g} (relative) from one "
                f"process, allowed {allowed:.1e}"
            )


def _worst(found: Mapping[str, Tensor], truth: Mapping[str, Tensor]) -> float:
    return max(relative(found[name], truth[name]) for name in truth)


def _params(count: int, dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(count)
    return [
        nn.Parameter(torch.randn(ROWS, COLUMNS, dtype=dtype, generator=generator))
        for _ in range(count)
    ]


def _give(params: list[nn.Parameter], step: int) -> None:
    """Gradients of step number `step`."""
    generator = torch.Generator().manual_seed(1000 + step)
    for p in params:
        p.grad = torch.randn(p.shape, dtype=p.dtype, generator=generator)


def _model() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(COLUMNS, 8), nn.Tanh(), nn.Linear(8, 2))


def _batch() -> Tensor:
    return torch.randn(5, COLUMNS, generator=torch.Generator().manual_seed(1))
