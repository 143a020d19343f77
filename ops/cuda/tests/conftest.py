"""The emulated device: this package's kernels at work on CPU tensors."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from ds_ops_cuda import fused, native

sys.path.insert(0, str(Path(__file__).parent))  # tests are imported without their folder

from emulation import emulated


@pytest.fixture(scope="session")
def _emulated(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    return emulated(tmp_path_factory.mktemp("emulated"))


@pytest.fixture
def device(_emulated: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """CPU tensors are taken for the device's, and the emulated module serves; the names of what was
    called.
    """
    calls: list[str] = []

    def call(name: str, on: torch.device, *arguments: Any) -> None:
        assert on.type == "cpu"
        calls.append(name)
        getattr(_emulated, name)(0, 0, *arguments)

    monkeypatch.setattr(native, "DEVICE", "cpu")
    monkeypatch.setattr(native, "_native", _emulated)
    monkeypatch.setattr(native, "call", call)
    monkeypatch.setattr(native, "processors", lambda device: 4)
    monkeypatch.setattr(fused, "available", lambda: None)
    return calls
