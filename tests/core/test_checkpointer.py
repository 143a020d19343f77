"""Who serves save and load: the plugin that the config names, else an installed one, else an error
with a name.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import ds_core
from ds_core.catalogue import install, offered_by
from ds_core.engine import Checkpointer
from ds_core.errors import PluginError, UsageError


class Recorder(Checkpointer):
    """Notes what it is called for."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def save(self, engine: Any, folder: Any, options: Any) -> None:
        self.calls.append(("save", engine.global_steps, folder, options.tag))

    def load(self, engine: Any, folder: Any, options: Any) -> Any:
        self.calls.append(("load", folder, options.strict, options.fallback))
        return "there", {"epoch": 1}

    def export(
        self, engine: Any, folder: Any, filename: str, exclude_frozen_parameters: bool
    ) -> bool:
        self.calls.append(("export", folder, filename, exclude_frozen_parameters))
        return True

    def wait(self) -> None:
        self.calls.append("wait")


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    def make(*answers: Any) -> Any:
        names = []
        for index, answer in enumerate(answers):
            name = f"checkpointer_plugin_{index}"
            module = ModuleType(name)
            module.ds_checkpointer = lambda ctx, answer=answer: answer  # type: ignore[attr-defined]
            monkeypatch.setitem(sys.modules, name, module)
            names.append(name)
        config = {"train_batch_size": 1, "plugins": {"load": names}}
        return ds_core.initialize(model=nn.Linear(2, 1), config=config)[0]

    return make


def test_a_plugin_that_takes_part_serves(engine: Any) -> None:
    recorder = Recorder()
    made = engine(None, recorder)
    made.wait_for_checkpoint()  # nothing was saved: nobody is asked
    assert made.save_checkpoint("a", tag="t") is True
    assert made.load_checkpoint("a", load_module_strict=False, fallback=True) == (
        "there",
        {"epoch": 1},
    )
    assert made.save_16bit_model("b", "w.safetensors") is True
    made.wait_for_checkpoint()
    made.destroy()  # `close` waits
    expected = [
        ("save", 0, "a", "t"),
        ("load", "a", False, True),
        ("export", "b", "w.safetensors", False),
        "wait",
    ]
    assert recorder.calls == [*expected, "wait"]


def test_an_installed_one_serves_without_being_named(engine: Any, tmp_path: Path) -> None:
    made = engine()
    made.save_checkpoint(str(tmp_path))
    with torch.no_grad():
        made.module.weight.zero_()
    made.load_checkpoint(str(tmp_path))
    assert made.module.weight.abs().sum() > 0
    made.destroy()


def test_two_are_an_error_that_names_both(engine: Any) -> None:
    with pytest.raises(PluginError, match=r"checkpointer_plugin_0.*checkpointer_plugin_1"):
        engine(Recorder(), Recorder()).save_checkpoint("a")


def test_something_else_is_an_error_of_the_plugin(engine: Any) -> None:
    with pytest.raises(
        PluginError, match=r"ds_checkpointer: it must return a Checkpointer or None, not a dict"
    ):
        engine({}).save_checkpoint("a")


@pytest.mark.parametrize("call", ["save_checkpoint", "load_checkpoint", "save_16bit_model"])
def test_without_any_the_error_names_what_to_install(
    engine: Any, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    monkeypatch.setattr("ds_core.plugins.registry.discover", lambda: ())
    dist = offered_by("drivers", "ds_checkpointer")
    assert dist is not None
    made = engine()
    with pytest.raises(UsageError) as caught:
        getattr(made, call)("a")
    assert install(dist) in str(caught.value) and dist in str(caught.value)
    made.wait_for_checkpoint()
    made.destroy()
