"""`ObserverConformance`: does a plugin only watch, on any number of ranks, and what all of them
agree on?

Subclass it, set `config` to what switches your plugin on (and `load` to its declaration module when
it is not installed). The kit trains and evaluates a small model with it on one and two ranks, and
without it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from ds_testing.pool import run_ranks

if TYPE_CHECKING:
    from torch import nn

    from ds_core.entries import Event


class ObserverConformance:
    """Subclass me; see the module's docstring."""

    config: ClassVar[Mapping[str, Any]] = {}
    load: ClassVar[tuple[str, ...]] = ()
    steps: ClassVar[int] = 4
    """How many optimizer steps are run, unless the plugin asks to stop."""
    stops_at: ClassVar[int | None] = None
    """The number of steps after which it asks to stop, in the kit's training, whose loss falls in
    every step; None: never.
    """
    metrics: ClassVar[tuple[str, ...]] = ()
    """Names that its `ds_metrics` gives after every step."""
    timeout: ClassVar[float] = 300.0

    def _run(
        self, world: int, extra: Mapping[str, Any], load: tuple[str, ...], *, error: bool = False
    ) -> list[Any]:
        return run_ranks(
            world, _train, self.steps, dict(extra), list(load), error, timeout=self.timeout
        )

    def test_training_is_the_same_with_it(self) -> None:
        """Losses and gradient norms are bit-identical, and no observer has failed."""
        for world in (1, 2):
            without = self._run(world, {}, ())
            with_it = self._run(world, self.config, self.load)
            for plain, watched in zip(without, with_it, strict=True):
                assert watched["failed"] == [], f"an observer failed: {watched['failed']}"
                assert watched["seen"] == plain["seen"][: len(watched["seen"])], (
                    "losses or norms are not those without it: an observer changes weights, "
                    "gradients or randomness"
                )
                assert watched["eval"] == plain["eval"] or self.stops_at is not None, (
                    "eval_batch gives another loss than without it: an observer changes the model"
                )

    def test_all_ranks_stop_in_the_same_step(self) -> None:
        """It asks to stop after `stops_at` steps, or never."""
        wanted = self.stops_at or self.steps
        for world in (1, 2):
            for answer in self._run(world, self.config, self.load):
                assert len(answer["seen"]) == wanted, (
                    f"{world} ranks trained {len(answer['seen'])} steps, not {wanted}; "
                    "ds_request answers Request(stop=True), and `stops_at` says after which step"
                )
                assert answer["stop"] is (self.stops_at is not None), (
                    "should_stop does not say that it asked to stop"
                )

    def test_its_metrics_reach_a_monitor(self) -> None:
        """Those of `metrics`, once per step, as finite numbers; on two ranks those of rank 0."""
        for world in (1, 2) if self.metrics else ():
            answer = self._run(world, self.config, self.load)[0]
            names = [name for name, value in answer["told"] if math.isfinite(value)]
            for name in self.metrics:
                assert names.count(name) == len(answer["seen"]), (
                    f"{name} is not among {sorted(set(names))} in each step"
                )

    def test_ranks_are_asked_for_metrics_alike(self) -> None:
        """`ds_listens` says the same of `ds_metrics` on every rank: there may be collectives in
        it."""
        said = [answer["listens"] for answer in self._run(2, self.config, self.load)]
        assert said[0] == said[1], (
            f"ds_listens differs on two ranks: ds_metrics every {said[0]} and {said[1]} steps"
        )

    def test_an_exception_that_ends_training_reaches_it(self) -> None:
        """The exception goes on, and no observer has failed."""
        (answer,) = self._run(1, self.config, self.load, error=True)
        assert answer["failed"] == [], (
            f"an observer failed when training ended by an exception: {answer['failed']}"
        )

    def test_what_it_keeps_in_checkpoints_survives(self) -> None:
        """Objects of `ds_checkpointables`: states of JSON and tensors, and a new run that loads
        them has the same.
        """
        (wrong,) = run_ranks(
            1, _restore, self.steps, dict(self.config), list(self.load), timeout=self.timeout
        )
        assert wrong == [], "; ".join(wrong)


def _restore(steps: int, extra: dict[str, Any], load: list[str]) -> list[str]:
    """What is wrong with the states that plugins keep; they are taken after `steps`, and loaded by
    another engine.
    """
    import torch

    import ds_core
    from ds_testing.kits.train.partitioner import with_plugins

    config: dict[str, Any] = {
        "train_batch_size": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.05}},
    }
    states: dict[str, Any] = {}
    wrong: list[str] = []
    # The first engine trains and gives its states; the second, which has not trained, loads them.
    for again in (False, True):
        engine, *_ = ds_core.initialize(model=_model(), config=with_plugins(config, extra, load))
        objects = engine.ctx.plugins.merged("ds_checkpointables", ctx=engine.ctx)
        for name, answer in objects.items() if again else ():
            answer.value.load_state_dict(copy.deepcopy(states[name]))
            if not _equal(answer.value.state_dict(), states[name]):
                wrong.append(
                    f"{name}: after load_state_dict, state_dict gives {answer.value.state_dict()!r}"
                )
        for _ in range(0 if again or not objects else steps):
            engine.backward(engine(torch.ones(2, 3, dtype=torch.float64)))
            engine.step()
        states = states or {
            name: copy.deepcopy(answer.value.state_dict()) for name, answer in objects.items()
        }
        engine.destroy()
    return wrong + [
        f"{name}: its state has {bad}, not JSON or a tensor"
        for name in states
        for bad in _odd(states[name])
    ]


def _odd(state: Any) -> list[str]:
    """What in a state is neither JSON nor a tensor."""
    import torch

    if isinstance(state, Mapping):
        return [
            bad
            for key, value in state.items()
            for bad in (*_odd(value), *([] if type(key) is str else [repr(key)]))
        ]
    if isinstance(state, (list, tuple)):
        return [bad for value in state for bad in _odd(value)]
    plain = state is None or isinstance(state, (bool, int, str, torch.Tensor))
    return [] if plain or (isinstance(state, float) and math.isfinite(state)) else [repr(state)]


def _equal(one: Any, other: Any) -> bool:
    import torch

    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)


def _train(steps: int, extra: dict[str, Any], load: list[str], error: bool) -> dict[str, Any]:
    import contextlib

    import torch

    import ds_core
    from ds_core import comm
    from ds_core.plugins import PluginState
    from ds_testing.kits.train.partitioner import with_plugins

    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.05}},
    }
    torch.manual_seed(3)
    model = _model()
    engine, *_ = ds_core.initialize(model=model, config=with_plugins(config, extra, load))
    x = torch.full((2, 3), 1.0 + comm.rank(), dtype=torch.float64)
    seen: list[list[float | None]] = []
    recorder = _Recorder()
    if comm.rank() == 0:
        engine.monitor.monitors.append(recorder)
    with contextlib.suppress(_EndOfTraining), contextlib.ExitStack() as stack:
        stack.callback(engine.destroy)
        while len(seen) < steps and not engine.should_stop:
            loss = engine(x)
            engine.backward(loss)
            engine.step()
            seen.append([loss.item(), engine.get_global_grad_norm()])
        evaluated = engine.eval_batch(iter([x])).item()
        stop = engine.should_stop
        if error:
            raise _EndOfTraining
    reports = engine.ctx.plugins.reports()
    failed = [r.why for r in reports if r.state is PluginState.SWITCHED_OFF]
    answers = engine.ctx.plugins.ask("ds_listens", ctx=engine.ctx)
    listens = [answer.value.get("ds_metrics", 1) for answer in answers]
    return {
        "seen": seen,
        "eval": evaluated,
        "stop": stop,
        "failed": failed,
        "told": recorder.told,
        "listens": listens,
    }


def _model() -> nn.Module:
    import torch

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(3, 1, dtype=torch.float64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.layer(x)
            return out.square().mean()

    return Model()


class _Recorder:
    """A monitor that keeps names and values."""

    name = "recorder"

    def __init__(self) -> None:
        self.told: list[tuple[str, float]] = []

    def write_events(self, events: Sequence[Event]) -> None:
        self.told += [(name, value) for name, value, _ in events]

    def flush(self) -> None: ...

    def close(self) -> None: ...


class _EndOfTraining(Exception):
    """What ends the kit's training."""
