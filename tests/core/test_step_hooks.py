"""What plugins see of a step and change in it: observers, requests, gradients, engine methods."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ds_testing import run_ranks
from torch import nn

import ds_core
from ds_core.errors import PluginError, UsageError

SGD = {"type": "SGD", "params": {"lr": 0.1}}
_number = itertools.count()
Start = Callable[..., Any]


class Loss(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).square().mean()


@pytest.fixture
def engine_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clean_ds: None) -> Iterator[Start]:
    """An engine whose config loads plugins with these bodies."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)

    def make(*bodies: str, **config: Any) -> Any:
        names = [f"hooked_{next(_number)}" for _ in bodies]
        for name, body in zip(names, bodies, strict=True):
            (tmp_path / f"{name}.py").write_text(f"SEEN = []\n{body}\n")
        torch.manual_seed(0)
        given = {
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": SGD,
            "plugins": {"load": names},
            **config,
        }
        engine, *_ = ds_core.initialize(model=Loss(2, 1), config=given)
        engine.seen = [sys.modules[name].SEEN for name in names]
        return engine

    yield make
    for name in set(sys.modules) - before:
        if name.startswith("hooked_"):
            del sys.modules[name]


def one_step(engine: Any) -> None:
    engine.backward(engine(torch.ones(2, 2)))
    engine.step()


OBSERVERS = {
    "ds_phase_begin": "phase",
    "ds_phase_end": "phase",
    "ds_step_begin": "step",
    "ds_step_end": "step",
    "ds_checkpoint_saved": "tag",
    "ds_checkpoint_loaded": "path",
    "ds_close": "error",
}
WATCHER = "\n".join(
    f"def {n}({a}): SEEN.append(({n[3:]!r}, {a or None}))" for n, a in OBSERVERS.items()
)


def test_observers_see_what_happens_in_its_order(engine_with: Start, tmp_path: Path) -> None:
    engine = engine_with(WATCHER)
    (seen,) = engine.seen
    one_step(engine)
    engine.save_checkpoint(str(tmp_path / "saved"))
    engine.load_checkpoint(str(tmp_path / "saved"))
    engine.eval_batch(iter([torch.ones(2, 2)]))
    engine.destroy()
    forward = [("phase_begin", "forward"), ("phase_end", "forward")]
    step = [("phase_begin", "step"), ("phase_end", "step")]
    inner = "backward_inner"
    reduction = "backward_allreduce"
    backward = [("phase_begin", "backward"), ("phase_begin", inner), ("phase_end", inner)]
    backward += [("phase_begin", reduction), ("phase_end", reduction), ("phase_end", "backward")]
    trained = [*forward, *backward, ("step_begin", 0), *step, ("step_end", 0)]
    assert seen[: len(trained)] == trained
    rest = ["checkpoint_saved", "checkpoint_loaded", *4 * ["phase"], "close"]
    assert [
        name.removesuffix("_begin").removesuffix("_end") for name, _ in seen[len(trained) :]
    ] == rest
    evaluated = [("phase_begin", "eval"), *forward, ("phase_end", "eval")]
    assert seen[-5:-1] == evaluated
    told = dict(seen)
    assert told["checkpoint_saved"] == "global_step1"
    assert told["checkpoint_loaded"].endswith("global_step1")


EVALUATES = """
def ds_listens(ctx): return {"ds_phase_begin": 0, "ds_phase_end": 0}
def ds_phase_begin(phase, inputs): SEEN.append((phase, inputs))
def ds_phase_end(phase, metrics): SEEN.append((phase, dict(metrics)))
"""
EVALUATED_BEFORE = """
def ds_eval_begin(): SEEN.append(("eval", None))
def ds_eval_end(ctx, metrics): SEEN.append(("eval", dict(metrics)))
"""


@pytest.mark.parametrize("body", [EVALUATES, EVALUATED_BEFORE])
@pytest.mark.filterwarnings("ignore:.*the phase .eval.:DeprecationWarning")
def test_an_evaluation_is_told_to_who_listens_to_no_step(engine_with: Start, body: str) -> None:
    engine = engine_with(body)
    (seen,) = engine.seen
    one_step(engine)
    assert seen == []
    loss = engine.eval_batch(iter([torch.ones(2, 2)]))
    assert seen == [("eval", None), ("eval", {"loss": loss.item()})]
    seen.clear()
    with pytest.raises(RuntimeError, match="shapes"):
        engine.eval_batch(iter([torch.ones(2, 3)]))
    assert seen == [("eval", None), ("eval", {})]


SPARSE = """
def ds_listens(ctx):
    return {"ds_phase_begin": 3, "ds_phase_end": 0, "ds_step_end": 2, "ds_metrics": 4}

def ds_phase_begin(phase): SEEN.append((phase, None))
def ds_phase_end(phase): SEEN.append((phase, "ends"))
def ds_step_end(step, metrics): SEEN.append(("step_end", step + 1, sorted(metrics)))
def ds_metrics(step): SEEN.append(("metrics", step + 1)); return {"Train/own": 1.0}
"""


def test_an_observer_is_called_in_the_steps_that_it_named(
    engine_with: Start, tmp_path: Path
) -> None:
    engine = engine_with(SPARSE, gradient_accumulation_steps=2)
    (seen,) = engine.seen

    def called(updates: int) -> list[Any]:
        seen.clear()
        for _ in range(2 * updates):
            one_step(engine)
        return [row[0] if row[0] != "step_end" else (row[1], "Train/own" in row[2]) for row in seen]

    phases = ["forward", "backward", "backward_inner", "backward_allreduce"]
    assert called(1) == []
    # Step 2 is read, 3 has its phases in both micro-batches, 4 is read and measured, 6 is both.
    assert called(3) == [(2, False), *phases, *phases, "step", "metrics", (4, True)]
    assert called(2) == [*phases, *phases, "step", (6, False)]
    engine.save_checkpoint(str(tmp_path / "at 6"))
    assert called(1) == []
    # After a load the steps are the checkpoint's: 7 comes again, then 8.
    engine.load_checkpoint(str(tmp_path / "at 6"))
    assert called(2) == ["metrics", (8, True)]


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ({"ds_close": 2}, "ds_listens of hooked_.* names ds_close; it may name ds_step_begin"),
        ({"ds_step_end": -1}, "'ds_step_end' must be a whole number from 0 on"),
        ({"ds_step_end": True}, "'ds_step_end' must be a whole number from 0 on"),
        ({"ds_step_end": 1.5}, "mapping of names to"),
    ],
)
def test_a_wrong_period_is_an_error_when_the_engine_is_built(
    engine_with: Start, answer: object, why: str
) -> None:
    with pytest.raises(PluginError, match=why):
        engine_with(f"def ds_listens(ctx): return {answer!r}\ndef ds_step_end(step): pass")


def test_an_exception_on_its_way_out_is_observed_once(engine_with: Start) -> None:
    engine = engine_with(WATCHER)
    (seen,) = engine.seen
    with pytest.raises(ZeroDivisionError):
        try:
            raise ZeroDivisionError("training")
        finally:
            engine.destroy()
    assert [(name, str(what)) for name, what in seen if name == "close"] == [("close", "training")]
    hook = sys.excepthook
    engine = engine_with(WATCHER)
    (seen,) = engine.seen
    assert sys.excepthook is not hook
    try:
        next(iter(()))
    except StopIteration:
        engine.destroy()
    assert sys.excepthook is hook
    assert seen == [("close", None)]


@pytest.mark.slow
def test_an_exception_that_nobody_catches_is_observed(tmp_path: Path) -> None:
    (tmp_path / "watch.py").write_text("def ds_close(error): print('seen:', repr(error))")
    (tmp_path / "train.py").write_text(
        "import torch, ds_core\n"
        "config = {'train_micro_batch_size_per_gpu': 1, 'optimizer': {'type': 'SGD', 'params': "
        "{'lr': 1}},"
        " 'plugins': {'load': ['watch']}}\n"
        "engine, *_ = ds_core.initialize(model=torch.nn.Linear(1, 1), config=config)\n"
        "raise ValueError('of the user')\n"
    )
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.stdout == "seen: ValueError('of the user')\n", done.stderr
    assert "raise ValueError('of the user')" in done.stderr  # the usual traceback


CLAMP = (
    "def ds_gradients(gradients):\n for s in gradients.shards: SEEN.append(s.name); "
    "s.tensor.clamp_(-1e-3, 1e-3)"
)


def test_gradients_that_are_not_finite_are_skipped_before_plugins_could_hide_it(
    engine_with: Start,
) -> None:
    engine = engine_with(CLAMP)
    engine.backward(engine(torch.full((2, 2), torch.inf)))
    engine.step()
    assert engine.skipped_steps == 1
    assert engine.seen == [[]]
    before = engine.module.weight.detach().clone()
    one_step(engine)
    assert engine.seen == [["weight", "bias"]]
    # 0.1 times what it was clamped to
    assert 0 < (engine.module.weight - before).abs().max() <= 1.01e-4
    assert engine.get_global_grad_norm() <= 1e-3 * 3**0.5 * 1.01  # of what the optimizer got


SUMS = """
def ds_gradients(gradients):
    SEEN.append((gradients.norm, gradients.total(lambda t: t.square().sum()) ** 0.5 * gradients.factor,
                 gradients.sums(lambda t: t.sum()), gradients.factor))
"""


def test_what_is_seen_of_gradients(engine_with: Start) -> None:
    engine = engine_with(SUMS, gradient_accumulation_steps=2, gradient_clipping=0.0)
    engine(torch.ones(2, 2)).backward()
    engine.step()
    engine(torch.ones(2, 2)).backward()
    expected = {n: p.grad.sum().item() for n, p in engine.module.named_parameters()}
    engine.step()
    ((norm, same, sums, factor),) = engine.seen[0]
    assert factor == 0.5  # a plain loss.backward() leaves the division by gas to the step
    assert norm == pytest.approx(same) == pytest.approx(engine.get_global_grad_norm())
    assert sums == pytest.approx(expected)


def test_a_plugin_that_fails_on_gradients_ends_training(engine_with: Start) -> None:
    engine = engine_with("def ds_gradients(gradients): raise ValueError('no')")
    with pytest.raises(PluginError, match="failed in ds_gradients: ValueError: no"):
        one_step(engine)


def test_gradients_that_the_optimizer_reduces_are_refused(engine_with: Start) -> None:
    with pytest.raises(UsageError, match=r"hooked_\d+.*ds_gradients.*OptimizerReduced does not"):
        engine_with(CLAMP, optimizer={"type": "OneBitAdam", "params": {"lr": 0.1}})


METHODS = """
def given(engine, more): return engine.global_steps + more
def ds_engine_methods(): return {'%s': __name__ + ':given'}
"""


def test_engine_methods(engine_with: Start) -> None:
    engine = engine_with(METHODS % "steps_and")
    one_step(engine)
    assert engine.steps_and(more=2) == 3


def test_engine_methods_that_are_taken(engine_with: Start) -> None:
    with pytest.raises(
        PluginError, match=r"'mine' is given by plugins .*hooked_\d+.* and .*hooked_\d+"
    ):
        engine_with(METHODS % "mine", METHODS % "mine")
    with pytest.raises(PluginError, match=r"hooked_\d+.*gives 'step', which the engine has itself"):
        engine_with(METHODS % "step")


def test_who_fails_to_ask_is_switched_off(
    engine_with: Start, caplog: pytest.LogCaptureFixture
) -> None:
    asks = (
        "from ds_core.entries import Request\ndef ds_request(step): return Request(stop=step == 1)"
    )
    engine = engine_with("def ds_request(step): return 'stop'", asks)
    one_step(engine)
    assert not engine.should_stop
    assert "must return a Request or None, not a str" in caplog.text
    one_step(engine)
    assert engine.should_stop


def test_a_plugin_ends_the_program_when_the_checkpoint_is_there(
    engine_with: Start, tmp_path: Path
) -> None:
    asks = "from ds_core.entries import Request\ndef ds_request(step): return Request("
    engine = engine_with(
        asks + f"save={str(tmp_path)!r}, exit_code=75)", asks + "stop=True, exit_code=3)"
    )
    with pytest.raises(SystemExit) as ended:
        one_step(engine)
    assert ended.value.code == 75
    assert engine.should_stop and (tmp_path / "latest").read_text().strip() == "global_step1"


def test_every_folder_that_is_asked_for_is_saved_into(engine_with: Start, tmp_path: Path) -> None:
    asks = "from ds_core.entries import Request\ndef ds_request(step): return Request("
    folders = [str(tmp_path / name) for name in "ab"]
    engine = engine_with(*(asks + f"save={folder!r})" for folder in [*folders, folders[0]]))
    one_step(engine)
    assert [sorted(p.name for p in Path(f).glob("[gl]*")) for f in folders] == [
        ["global_step1", "latest"]
    ] * 2


LARGEST = """
def ds_metrics(ctx, step):
    import torch
    SEEN.append(step)
    return {"Train/number": step + 0.5, "Train/tensor": torch.tensor(2.0 * step)}
"""
READS = "def ds_step_end(metrics): SEEN.append(dict(metrics))"


class Kept:
    """A monitor that keeps what it gets."""

    name = "kept"

    def __init__(self) -> None:
        self.events: list[Any] = []

    def write_events(self, events: Any) -> None:
        self.events += events

    def flush(self) -> None: ...
    def close(self) -> None: ...


def test_metrics_of_plugins_reach_observers_and_monitors(engine_with: Start) -> None:
    engine = engine_with(LARGEST, READS)
    kept = Kept()
    engine.monitor.monitors.append(kept)
    one_step(engine)
    one_step(engine)
    steps, metrics = engine.seen
    assert steps == [0, 1]
    assert [(m["Train/number"], m["Train/tensor"], m["skipped_steps"]) for m in metrics] == [
        (0.5, 0.0, 0),
        (1.5, 2.0, 0),
    ]
    assert all(type(value) in (float, int) for m in metrics for value in m.values())
    engine.monitor.flush()
    told = {event.name: event for event in kept.events if event.step == 4}
    expected = {"train_loss", "lr", "grad_norm", "skipped_steps"}
    assert set(told) == {
        "Train/number",
        "Train/tensor",
        *(f"Train/Samples/{name}" for name in expected),
    }
    assert (
        told["Train/tensor"].value == 2.0
        and told["Train/Samples/grad_norm"].value == metrics[1]["grad_norm"]
    )


def test_metrics_that_nobody_reads_are_not_computed(engine_with: Start) -> None:
    engine = engine_with(LARGEST)
    one_step(engine)
    assert engine.seen == [[]]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("{'a/b': 'high'}", "objects with __float__"),
        ("{'a/b': __import__('torch').ones(2)}", "'a/b' must be a number"),
    ],
)
def test_metrics_that_are_no_numbers_switch_the_plugin_off(
    engine_with: Start, caplog: pytest.LogCaptureFixture, body: str, words: str
) -> None:
    engine = engine_with(f"def ds_metrics(): return {body}", READS)
    one_step(engine)
    one_step(engine)
    assert caplog.text.count("failed in ds_metrics") == 1 and words in caplog.text
    assert len(engine.seen[1]) == 2


def test_users_log_their_own(engine_with: Start) -> None:
    engine = engine_with()
    kept = Kept()
    engine.monitor.monitors.append(kept)
    one_step(engine)
    kept.events.clear()
    engine.log({"Eval/accuracy": torch.tensor([0.5]), "Eval/count": 3})
    engine.log({"Eval/accuracy": 0.75}, step=7)
    engine.monitor.flush()
    assert kept.events == [
        ("Eval/accuracy", 0.5, 2),
        ("Eval/count", 3.0, 2),
        ("Eval/accuracy", 0.75, 7),
    ]
    assert [type(event.value) for event in kept.events] == [float] * 3
    engine.monitor.monitors.clear()  # as on other ranks: what is wrong is told there too
    for wrong in ("high", "1", None, torch.ones(2), [1.0]):
        with pytest.raises(UsageError, match="metric 'x' is"):
            engine.log({"x": wrong})
    with pytest.raises(UsageError, match="step an integer"):
        engine.log({"x": 1.0}, step="now")


def _agreed_reading(listening: int) -> list[int]:
    """Two ranks with a plugin whose metrics need both; which ranks are asked for them, by step."""
    import types

    from ds_core import comm

    asked: list[int] = []

    def ds_metrics(ctx: Any, step: int) -> dict[str, Any]:
        total = torch.ones(())
        comm.all_reduce(total)
        asked.append(int(total))
        return {"Train/ranks": total}

    sys.modules["both_ranks"] = types.ModuleType("both_ranks")
    sys.modules["both_ranks"].ds_metrics = ds_metrics  # type: ignore[attr-defined]
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": SGD,
        "plugins": {"load": ["both_ranks"]},
    }
    engine, *_ = ds_core.initialize(model=Loss(2, 1), config=config)
    kept = Kept()
    if comm.rank() < listening:
        engine.monitor.monitors.append(kept)
    one_step(engine)
    one_step(engine)
    engine.destroy()
    return asked + [int(e.value) for e in kept.events if e.name == "Train/ranks"]


def test_all_ranks_compute_metrics_when_rank_0_has_a_reader() -> None:
    assert run_ranks(2, _agreed_reading, 1) == [[2, 2, 2, 2], [2, 2]]
    assert run_ranks(2, _agreed_reading, 0) == [[], []]
