"""``initialize(plugins=[...])``: modules and objects that take part in one engine alone."""

from __future__ import annotations

import gc
import subprocess
import sys
import types
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from ds_testing import RemoteError, run_ranks
from torch import nn

import ds_core
from ds_core.config import Section
from ds_core.errors import ConfigError, PluginError, UsageError

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
}


class Counter:
    """Holds state; its methods are hooks."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.closed = 0

    def ds_step_end(self, step: int) -> None:
        self.steps.append(step)

    def ds_close(self) -> None:
        self.closed += 1


class Limit(Section):
    """Of the section `limit`."""

    most: int = 3


class Limited:
    """Has a section of its own, which a mapping names."""

    def ds_config(self) -> Mapping[str, Any]:
        return {"limit": Limit}

    def ds_request(self, ctx: Any, step: int) -> Any:
        from ds_core.entries import Request

        section = ctx.config.section(Limit)
        return Request(stop=True) if section is not None and step + 1 >= section.most else None


def engine_with(*plugins: Any, **sections: Any) -> Any:
    torch.manual_seed(0)
    return ds_core.initialize(
        model=nn.Linear(3, 1), config={**CONFIG, **sections}, plugins=plugins
    ).engine


def run(engine: Any, steps: int = 1) -> None:
    for _ in range(steps):
        engine.backward(engine(torch.ones(2, 3)).mean())
        engine.step()


def module(name: str, **functions: Callable[..., Any]) -> Any:
    made = types.ModuleType(name)
    vars(made).update(functions)
    return made


def test_an_object_sees_its_own_engine_alone() -> None:
    first, second = Counter(), Counter()
    one, two, three = engine_with(first), engine_with(second), engine_with()
    run(one, 2)
    run(two)
    run(three)
    assert (first.steps, second.steps) == ([0, 1], [0])
    one.destroy()
    assert (first.closed, second.closed) == (1, 0)
    run(two)
    assert second.steps == [0, 1]
    two.destroy()
    three.destroy()


def test_nothing_is_left_after_destroy() -> None:
    counter = Counter()
    gone = weakref.ref(counter)
    engine = engine_with(counter)
    run(engine)
    engine.destroy()
    del engine, counter
    gc.collect()
    assert gone() is None
    assert not [m for m in sys.modules if "Counter" in m]


def test_several_objects_of_a_class_are_called_in_order() -> None:
    seen: list[str] = []

    class Named:
        def __init__(self, name: str) -> None:
            self.name = name

        def ds_step_end(self, step: int) -> None:
            seen.append(self.name)

    engine = engine_with(
        Named("a"), Named("b"), module("acme.c", ds_step_end=lambda: seen.append("c"))
    )
    run(engine)
    engine.destroy()
    assert seen == ["a", "b", "c"]


def test_a_section_of_a_given_object() -> None:
    engine = engine_with(Limited(), limit={"most": 2})
    run(engine)
    assert not engine.should_stop
    run(engine)
    assert engine.should_stop
    engine.destroy()
    with pytest.raises(
        ConfigError, match=r"limit.mots: unknown key 'mots'.*did you mean 'limit.most'"
    ):
        engine_with(Limited(), limit={"mots": 2})
    with pytest.raises(ConfigError, match="limit"):
        engine_with(limit={"most": 2})


def test_a_bare_model_is_named_after_the_module() -> None:
    opened = []
    early = module(
        "acme.early_stop",
        ds_config=lambda: Limit,
        ds_open=lambda ctx: opened.append(ctx.config.section(Limit)),
    )
    engine_with(early, early_stop={"most": 7}).destroy()
    engine_with(early).destroy()
    assert opened == [Limit(most=7), None]


def test_two_for_one_section_are_an_error_that_names_both() -> None:
    with pytest.raises(PluginError) as caught:
        engine_with(Limited(), module("acme.limit", ds_config=lambda: Limit))
    assert str(caught.value) == (
        "config dict: section 'limit' is offered by "
        "'limit' (loaded by initialize(plugins=), module acme.limit) "
        "and 'limit' (loaded by initialize(plugins=), module 0.Limited); leave one out"
    )


def test_it_wins_over_an_installed_package() -> None:
    mine = module("mine.zero_optimization", ds_config=lambda: Limit)
    engine = engine_with(mine, zero_optimization={"most": 1})
    assert engine.config.section(Limit) == Limit(most=1)
    engine.destroy()


def test_two_that_drive_are_an_error() -> None:
    def ds_runner(ctx: Any) -> Any:
        return ds_core.Sequential()

    with pytest.raises(PluginError, match=r"ds_runner is answered by .*a.one\) and .*a.two\)"):
        engine_with(module("a.one", ds_runner=ds_runner), module("a.two", ds_runner=ds_runner))


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        ("my_module", UsageError, "item 0 is 'my_module'; give a module, or an object"),
        (Counter, UsageError, "item 0 is <class '.*Counter'>; give a module, or an object"),
        (7, PluginError, "plugin '0.int' .* defines no hook; known hooks"),
        (
            module("m", ds_setp_end=lambda: None),
            PluginError,
            "unknown hook 'ds_setp_end'.*ds_step_end",
        ),
        (module("m", ds_step_end=lambda speed: None), PluginError, "does not fit the hooks.*speed"),
        (module("m", DS_CONTRACT=99, ds_close=lambda: None), PluginError, "99"),
    ],
)
def test_what_is_no_plugin_is_refused(given: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        engine_with(given)


def test_one_that_fails_is_named() -> None:
    def fails(ctx: Any) -> None:
        raise ValueError("no disk")

    with pytest.raises(PluginError, match=r"module m\) failed in ds_open: ValueError: no disk"):
        engine_with(module("m", ds_open=fails))


def test_an_observer_that_fails_is_switched_off(caplog: pytest.LogCaptureFixture) -> None:
    def fails() -> None:
        raise ValueError("no disk")

    engine = engine_with(module("m", ds_step_end=fails))
    with caplog.at_level("WARNING", logger="ds_core"):
        run(engine, 2)
    engine.destroy()
    assert [r.getMessage() for r in caplog.records] == [
        "plugin 'm' (loaded by initialize(plugins=), module m) failed in ds_step_end: ValueError: no "
        "disk; the plugin is switched off and training continues"
    ]


def differing() -> None:
    rank = torch.distributed.get_rank()
    engine_with(*[Counter()] * rank).destroy()


def test_ranks_that_differ_are_named() -> None:
    with pytest.raises(RemoteError) as caught:
        run_ranks(2, differing)
    text = str(caught.value)
    assert "the 2 ranks were started differently in 1 item(s)" in text
    assert "plugin 0.Counter" in text
    assert "rank 0: (missing)" in text


# -- the names of ds_core --------------------------------------------------------------------------


def test_dir_shows_public_names_alone() -> None:
    shown = dir(ds_core)
    assert {"Engine", "initialize", "__version__", "contract"} <= set(shown)
    assert not {"Any", "Mapping", "importlib", "sys", "names_on_first_use"} & set(shown)
    assert all(hasattr(ds_core, name) for name in shown)


def test_initialize_returns_a_named_tuple() -> None:
    found = ds_core.initialize(model=nn.Linear(3, 1), config=CONFIG)
    engine, optimizer, loader, scheduler = found
    assert found.engine is engine and found.optimizer is optimizer is engine.optimizer
    assert found.training_dataloader is loader is None and found.lr_scheduler is scheduler is None
    assert isinstance(found, ds_core.Initialized) and isinstance(found, tuple)
    engine.destroy()


def test_compat_is_a_file_and_says_what_is_missing() -> None:
    absent = "import sys; sys.modules['ds_deepspeed_compat'] = None; import ds_core.compat"
    done = subprocess.run([sys.executable, "-c", absent], capture_output=True, text=True)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith(
        "ModuleNotFoundError: ds_core.compat needs the package dscore-deepspeed-compat; install it "
        "with `pip install "
    )
    code = "import sys, ds_core.compat as c; c.install(); print(c.__file__, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == [ds_core.__file__.replace("__init__", "compat/__init__"), "False"]
