"""The kernel of the global norm: looked for under the device and dtype of the masters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ds_testing import run_ranks
from torch import Tensor

from ds_core.partition import GradGroup, GradNorm


def test_the_norm_uses_the_kernel_of_the_masters_device_and_dtype() -> None:
    asked: list[tuple[str, torch.dtype]] = []

    def kernel_for(device: str, dtype: torch.dtype) -> Any:
        asked.append((device, dtype))

        def kernel(tensors: list[Tensor]) -> Tensor:
            assert {(t.device.type, t.dtype) for t in tensors} == {(device, dtype)}
            return sum(
                (t.double().square().sum() for t in tensors), torch.zeros((), dtype=torch.float64)
            )

        return kernel

    from ds_core.mesh import plan_mesh

    mesh = plan_mesh([], 1, 0)
    here = torch.device("cpu")
    masters = [torch.zeros(2), torch.zeros(1, dtype=torch.float64)]
    norm = GradNorm(mesh, [()], kernel_for, masters)
    assert sorted(asked, key=str) == [("cpu", torch.float32), ("cpu", torch.float64)]
    grads = [
        torch.tensor([3.0, 0.0]),
        torch.tensor([4.0], dtype=torch.float64),
        torch.tensor([0.0, 12.0]),
    ]
    assert norm([GradGroup((), grads)], here) == 13.0
    assert norm([GradGroup((), [])], here) == 0.0
    only = GradNorm(mesh, [()], kernel_for, masters[:1])
    assert only([GradGroup((), grads[:1])], here) == 3.0


def resolved(section: str) -> list[str]:
    """Under which devices and dtypes the engine looks for the norm's kernel."""
    import ds_core

    engine, *_ = ds_core.initialize(
        model=torch.nn.Linear(3, 3),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            section: {"enabled": True},
        },
    )
    kinds = [f"{device} {dtype}" for device, dtype in engine._weight_update.norm._kernels]
    engine.destroy()
    return kinds


@pytest.mark.parametrize("section", ["bf16", "fp16"])
def test_under_16_bit_modes_the_norm_is_of_fp32_masters(section: str) -> None:
    assert run_ranks(1, resolved, section) == [["cpu torch.float32"]]
