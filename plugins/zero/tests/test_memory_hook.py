"""`ds_memory` of dscore-zero: what tools are told is the plan of the config's own stage and offload."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ds_plan import Offload, PlannedRun
from ds_testing import MemoryConformance
from ds_zero.config import ZeroConfig
from ds_zero.planning.planner import offload_of
from ds_zero.planning.predict import predict
from torch import nn

CPU = {"device": "cpu"}
DISK = {"device": "nvme", "nvme_path": "/tmp"}
ADAM = {"type": "AdamW", "params": {"lr": 1e-3}}


class TestStage0(MemoryConformance):
    config = {"zero_optimization": {"stage": 0}, "optimizer": ADAM}


class TestStage2(MemoryConformance):
    config = {"zero_optimization": {"stage": 2}, "optimizer": ADAM, "bf16": {"enabled": True}}


class TestStage3Offloaded(MemoryConformance):
    config = {
        "zero_optimization": {"stage": 3, "offload_optimizer": CPU, "offload_param": CPU},
        "optimizer": ADAM,
    }

    def test_it_is_the_plan(self) -> None:
        module = self.model(64)
        section = ZeroConfig.model_validate(self.config["zero_optimization"])
        need = predict(module, section, PlannedRun(2), Offload.ALL)
        told = self.memory(module, 2)
        assert told == {"device": need.device.peak, "host": need.host.peak, "disk": 0}
        assert told["host"] > told["device"] > 0


def test_the_optimizer_is_the_configs() -> None:
    class Plain(MemoryConformance):
        config = {
            "zero_optimization": {"stage": 1},
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        }

    module = nn.Linear(512, 512, device="meta", dtype=torch.float32)
    plain = Plain().memory(module, 1)["device"]
    adam = TestStage0().memory(module, 1)["device"]
    assert adam - plain >= 2 * 4 * 512 * 512


@pytest.mark.parametrize(
    ("section", "offload"),
    [
        ({"stage": 0}, Offload.NONE),
        ({"stage": 2}, Offload.NONE),
        ({"stage": 2, "offload_optimizer": CPU}, Offload.OPTIMIZER),
        ({"stage": 2, "offload_optimizer": DISK}, Offload.DISK),
        ({"stage": 3, "offload_param": CPU}, Offload.ALL),
        ({"stage": 3, "offload_optimizer": DISK, "offload_param": DISK}, Offload.DISK_ALL),
        ({"stage": 3, "offload_optimizer": CPU}, Offload.OPTIMIZER),
    ],
)
def test_which_offload_a_section_asks_for(section: dict[str, Any], offload: Offload) -> None:
    assert offload_of(ZeroConfig.model_validate(section)) is offload
