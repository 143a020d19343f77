"""The engine takes these kernels through the hook, and trains without them where there is no
compiler.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from ds_kernel_kit import build
from ds_ops_cpu.plugin import OPS
from ds_testing.truth import plain, start, train
from torch import nn

import ds_core

pytestmark = pytest.mark.usefixtures("clean_ds")

CONFIG: dict[str, Any] = {
    "gradient_clipping": 0.01,
    # from here, also where it is installed
    "plugins": {"load": ["ds_ops_cpu.plugin"], "disable": ["dscore-ops-cpu"]},
}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def batch(step: int, _: int) -> torch.Tensor:
    return torch.full((2, 4), float(step))


def trained(config: dict[str, Any]) -> tuple[nn.Module, ds_core.Engine]:
    engine = start(model(), **config)
    train(engine, batch, 5)
    return engine.module, engine


def alone() -> nn.Module:
    net = model()
    plain(net, batch, 5, clip=0.01)
    return net


def assert_same(mine: nn.Module, theirs: nn.Module) -> None:
    for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_the_norm_is_taken_here(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "ds_core"):
        net, engine = trained(CONFIG)
    assert (
        engine.ctx.kernels.resolved()["squared_norm/cpu/float32"] == "cpp (loaded by plugins.load)"
    )
    assert any(
        "squared_norm by cpp (loaded by plugins.load)" in r.getMessage() for r in caplog.records
    )
    assert_same(net, alone())


def test_a_machine_without_a_compiler_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DS_CORE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "_LOADED", {})
    monkeypatch.setattr(build, "_tool", lambda _: None)
    with caplog.at_level(logging.INFO, "ds_core"):
        net, engine = trained(CONFIG)
    used = {op.split("/")[0]: who for op, who in engine.ctx.kernels.resolved().items()}
    assert {used[op] for op in OPS} == {"reference (dscore-kernel-kit)"}
    lines = [r.getMessage() for r in caplog.records if r.getMessage().startswith("kernels:")]
    assert (
        len(lines) == 1 and "g++ and ninja not found" in lines[0] and "apt install g++" in lines[0]
    )
    assert_same(net, alone())


def test_the_config_turns_it_off() -> None:
    net, engine = trained({**CONFIG, "kernels": {"squared_norm": "reference"}})
    assert (
        engine.ctx.kernels.resolved()["squared_norm/cpu/float32"] == "reference (dscore-kernel-kit)"
    )
    assert_same(net, alone())
