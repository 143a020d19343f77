"""Fixtures of the command's tests; `cli_runs` has their helpers."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ds_core.plugins import BACKENDS, Found
from ds_core.plugins import registry as P

sys.path.insert(0, str(Path(__file__).parent))

from cli_runs import LEAVE_PID  # noqa: E402


@pytest.fixture
def script(tmp_path: Path) -> Any:
    def make(body: str, name: str = "script.py") -> str:
        file = tmp_path / name
        file.write_text(LEAVE_PID + body)
        return str(file)

    return make


@pytest.fixture
def one_process_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script's processes by default: one, as without accelerators."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Found]:
    """Make a declaration module of functions and let it be what is installed, beside what was
    before.
    """
    rows: list[Found] = []
    monkeypatch.setattr(P, "discover", lambda: tuple(sorted(rows)))

    def make(name: str, dist: str = "ds-x", group: str = BACKENDS, **members: Any) -> Found:
        module = types.ModuleType(f"made_{name}_{dist.replace('-', '_')}")
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        rows.append(Found(name, group, module.__name__, dist, "1.0"))
        return rows[-1]

    return make
