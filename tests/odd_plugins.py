"""Plugins that are written for one test, and installed for it alone."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ds_core.plugins.discovery import BACKENDS, Found

PLAIN = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
HEAD = "import functools, sys\nfrom ds_core.entries import *\nfrom ds_core.errors import *\n"
HEAD += "from ds_command_kit.run_options import RunOption\n"
_number = itertools.count()

Write = Callable[..., Found]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Write a declaration module; its entry point is installed for `Plugins()` and everything that
    uses one.
    """
    installed: list[Found] = []
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("ds_core.plugins.registry.discover", lambda: tuple(sorted(installed)))
    before = set(sys.modules)

    def make(body: str, name: str = "odd", group: str = BACKENDS, dist: str = "ds-odd") -> Found:
        module = f"odd_plugin_{next(_number)}"
        (tmp_path / f"{module}.py").write_text(HEAD + body)
        installed.append(Found(name, group, module, dist, "1.0"))
        return installed[-1]

    yield make
    for name in set(sys.modules) - before:
        if name.startswith("odd_plugin_"):
            del sys.modules[name]
