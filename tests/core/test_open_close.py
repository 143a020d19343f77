"""`ds_open` and `ds_close`: plugins hear that the engine is built, and that training ends; older
forms of both.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ds_testing import run_ranks
from torch import nn

import ds_core
from ds_core.errors import PluginError

Start = Callable[..., Any]
_number = itertools.count()
SGD = {"type": "SGD", "params": {"lr": 0.1}}


def planted(folder: Path, *bodies: str) -> list[str]:
    """Modules with these bodies, by name."""
    names = [f"opened_{next(_number)}" for _ in bodies]
    for name, body in zip(names, bodies, strict=True):
        (folder / f"{name}.py").write_text(f"SEEN = []\n{body}\n")
    return names


@pytest.fixture
def engine_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clean_ds: None) -> Iterator[Start]:
    """An engine whose config loads plugins with these bodies."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(*bodies: str, model: nn.Module | None = None, **config: Any) -> Any:
        names = planted(tmp_path, *bodies)
        given = {
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": SGD,
            "plugins": {"load": names},
            **config,
        }
        engine, *_ = ds_core.initialize(model=model or nn.Linear(2, 1), config=given)
        engine.seen = [sys.modules[name].SEEN for name in names]
        return engine

    yield make
    for name in [name for name in sys.modules if name.startswith("opened_")]:
        del sys.modules[name]


OPENS = """
def ds_open(ctx):
    engine = ctx.engine
    SEEN.append((engine.global_steps, engine.is_gradient_accumulation_boundary(), engine.last(4)))
    engine.optimizer.param_groups[0]["lr"] = 0.5  # it may change what is trained

def last(engine, n): return n + engine.global_steps
def ds_engine_methods(): return {"last": __name__ + ":last"}
def ds_listens(ctx):
    SEEN.append("listens")
    return {"ds_step_end": 1}
def ds_step_end(step): SEEN.append(step)
def ds_close(ctx, error): SEEN.append(error)
"""


def test_the_engine_is_whole_when_it_is_opened(engine_with: Start) -> None:
    engine = engine_with(OPENS)
    (seen,) = engine.seen
    # who listens is asked when plugins have made what they need
    assert seen == [(0, True, 4), "listens"]
    assert engine.get_lr() == [0.5]
    engine.destroy()
    assert seen[2:] == [None]


REFUSES = (
    "def ds_open(ctx): raise RuntimeError('not this one')\ndef ds_close(error): SEEN.append(error)"
)


@pytest.mark.parametrize("stage", [0, 3])
def test_who_cannot_open_ends_initialize_and_gives_the_model_back(
    engine_with: Start, stage: int
) -> None:
    model = nn.Linear(2, 1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(PluginError, match="opened_.*failed in ds_open: RuntimeError: not this one"):
        engine_with(REFUSES, model=model, zero_optimization={"stage": stage})
    assert {name: value.tolist() for name, value in model.state_dict().items()} == {
        name: value.tolist() for name, value in before.items()
    }
    engine = engine_with(OPENS, model=model)
    engine.backward(engine(torch.ones(2, 2)).sum())
    engine.step()
    engine.destroy()


def one_rank_cannot_open(folder: str) -> list[str]:
    sys.path.insert(0, folder)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": SGD,
        "zero_optimization": {"stage": 3},
        "plugins": {"load": ["refuses_on_rank_1"]},
    }
    model = nn.Linear(2, 1)
    try:
        ds_core.initialize(model=model, config=config)
    except ds_core.errors.DSError as error:
        return [type(error).__name__, str(error), str(tuple(model.weight.shape))]
    finally:
        sys.path.remove(folder)
    return []


def test_what_one_rank_cannot_open_all_ranks_refuse(tmp_path: Path) -> None:
    text = "def ds_open(ctx):\n    if ctx.rank == 1: raise OSError('no disk')\n"
    (tmp_path / "refuses_on_rank_1.py").write_text(text)
    ours, theirs = run_ranks(2, one_rank_cannot_open, str(tmp_path))
    assert ours[0] == "LostRankError" and "rank 1" in ours[1] and "no disk" in ours[1]
    assert theirs[0] == "PluginError" and "no disk" in theirs[1]
    assert ours[2] == theirs[2] == "(1, 2)"


OLD = """
def ds_engine_methods(ctx): return {"given_at_start": lambda engine, n: n + engine.global_steps + ctx.world_size}
def ds_exception(error): SEEN.append(error)
def ds_close(ctx): SEEN.append("closed")
"""


def test_older_forms_work_on_and_say_what_to_write(engine_with: Start) -> None:
    with pytest.warns(DeprecationWarning, match="now|any more") as warned:
        engine = engine_with(OLD)
    texts = sorted(str(w.message) for w in warned)
    assert (
        "ds_engine_methods takes no arguments any more" in texts[0] and "ds_open(ctx)" in texts[0]
    )
    assert "ds_exception is ds_close(ctx, error) now" in texts[1]
    (seen,) = engine.seen
    assert engine.given_at_start(2) == 3
    error = ZeroDivisionError("training")
    with pytest.raises(ZeroDivisionError):
        try:
            raise error
        finally:
            engine.destroy()
    assert seen == [error, "closed"]


def test_methods_given_as_functions_work_on(engine_with: Start) -> None:
    body = "def mine(engine): return 7\ndef ds_engine_methods(): return {'mine': mine}"
    with pytest.warns(DeprecationWarning, match=r"give the reference 'opened_\d+:mine'"):
        engine = engine_with(body)
    assert engine.mine() == 7


def test_one_reference_from_two_plugins_is_one_method(engine_with: Start) -> None:
    body = "def ds_engine_methods(): return {'dumps': 'json:dumps'}"
    engine = engine_with(body, body)
    assert "dumps" in engine._methods
    with pytest.raises(PluginError, match="'dumps' is given by plugins"):
        engine_with(body, "def ds_engine_methods(): return {'dumps': 'json:loads'}")
    with pytest.raises(PluginError, match="'dumps' is 'json.dumps', which is no reference"):
        engine_with("def ds_engine_methods(): return {'dumps': 'json.dumps'}")
