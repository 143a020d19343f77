"""Norms, overflows and loss scales of `deepspeed.runtime`, for loops that work on gradients
themselves.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ds_deepspeed_compat.engines.loss_scaler import CreateLossScaler, DynamicLossScaler, LossScaler
from ds_deepspeed_compat.utils import norms, tensor_helpers
from ds_testing import run_ranks
from torch import nn

from ds_core import comm
from ds_core.errors import LossScaleError, UsageError


def params(*grads: list[float]) -> list[nn.Parameter]:
    found = [nn.Parameter(torch.tensor(grad)) for grad in grads]
    for param in found:
        param.grad = param.detach().clone()
    return found


def test_norms_of_one_rank() -> None:
    found = params([3.0, 0.0], [4.0])
    assert norms.get_grad_norm(found) == norms.get_weight_norm(found) == 5
    assert norms.get_grad_norm(found, math.inf) == 4
    assert norms.get_grad_norm(found, 1) == 7
    assert norms.get_grad_zeros(found) == 1
    assert (
        norms.get_flattened_grad_norm(
            found, grad_norm_mask=[torch.tensor([[0, 1]]), torch.empty(0)]
        )
        == 4
    )
    assert float(norms.clip_grad_norm_(found, 2.5)) == 5
    assert [p.grad.tolist() for p in found if p.grad is not None] == [
        pytest.approx([1.5, 0]),
        pytest.approx([2.0]),
    ]
    tensors = [torch.tensor([3.0]), torch.tensor([4.0])]
    assert norms.clip_tensors_by_global_norm(tensors, 10.0) == 5 and tensors[0] == 3
    norms.clip_tensors_by_global_norm(tensors, 1.0)
    assert tensors[1].item() == pytest.approx(0.8)
    assert norms.get_global_norm([3.0, 4.0]) == 5


def test_what_is_not_finite_is_never_a_number() -> None:
    bad = params([math.inf])
    assert (
        norms.get_grad_norm(bad)
        == norms.get_global_norm_of_tensors([torch.tensor([math.nan])])
        == -1
    )
    assert (
        norms.get_global_norm([1.0, -1.0])
        == math.inf
        == norms.combine_grad_norm_groups([1.0, torch.tensor(-1.0)])
    )
    assert norms.CheckOverflow([bad]).check() and not norms.CheckOverflow([params([1.0])]).check()
    assert norms.CheckOverflow().check([bad]) and norms.CheckOverflow().check_using_norm(
        [1.0, -1.0]
    )
    assert not norms.has_inf_or_nan(torch.empty(0))
    assert norms.has_inf_or_nan(torch.tensor([[1.0, -math.inf]]).to_sparse())


def over_ranks() -> dict[str, Any]:
    rank = comm.rank()
    mpu = SimpleNamespace(
        get_model_parallel_rank=lambda: rank,
        get_model_parallel_world_size=comm.world_size,
        get_model_parallel_group=lambda: dist.group.WORLD,
    )
    divided, alike = params([3.0 + rank], [12.0])
    divided.model_parallel = True  # type: ignore[attr-defined]
    bad = params([math.nan if rank else 1.0])
    found = {
        "norm": norms.get_grad_norm([divided, alike], mpu=mpu),
        "largest": norms.get_grad_norm([divided], math.inf, mpu),
        "clipped": float(norms.clip_grad_norm_([divided, alike], 6.5, mpu=mpu)),
        "alone": norms.CheckOverflow([bad]).check(),
        "agreed": norms.CheckOverflow([bad], mpu=mpu).check(),
        "by norm": norms.CheckOverflow().check_using_norm([float(rank == 0) - 1]),
    }
    flat = torch.zeros(4)
    mine = flat.chunk(2)
    mine[rank].fill_(rank + 1)
    tensor_helpers.all_gather_dp_groups([flat], [mine], [dist.group.WORLD], 2, 100)
    assert divided.grad is not None
    return {**found, "flat": flat.tolist(), "grad": divided.grad.item()}


def test_norms_and_overflows_over_ranks() -> None:
    first, second = run_ranks(2, over_ranks)
    assert first["norm"] == second["norm"] == first["clipped"] == 13
    assert first["largest"] == 4
    assert (first["grad"], second["grad"]) == (pytest.approx(1.5), pytest.approx(2.0))
    assert (first["alone"], second["alone"]) == (False, True)
    assert first["agreed"] and second["agreed"] and first["by norm"]
    assert first["flat"] == second["flat"] == [1, 1, 2, 2]


def test_a_loss_scale_of_ones_own() -> None:
    made = {
        "init_scale": 16.0,
        "scale_window": 2,
        "min_scale": 8.0,
        "delayed_shift": 1,
        "consecutive_hysteresis": False,
    }
    scaler = CreateLossScaler(torch.half, 1.0, True, made)
    assert isinstance(scaler, DynamicLossScaler) and scaler.dynamic
    weight = nn.Parameter(torch.ones(1))
    scaler.backward((weight * 2).sum())
    assert weight.grad == 32 and not scaler.has_overflow([weight])
    for overflow in (True, False, False, False):
        scaler.update_scale(overflow)
    assert (scaler.loss_scale, scaler.cur_iter, scaler.last_overflow_iter) == (16.0, 4, 0)
    scaler.update_scale(True)
    with pytest.raises(LossScaleError):
        scaler.update_scale(True)
    kept = DynamicLossScaler(8.0, 2, 8.0, 1, False, raise_error_at_min_scale=False)
    kept.update_scale(True)
    assert (kept.cur_scale, kept.cur_iter) == (8.0, 1)
    assert CreateLossScaler(torch.half, 4.0, False, None).loss_scale == 4
    assert (
        CreateLossScaler(torch.bfloat16, 4.0, True, None).loss_scale == 1 == LossScaler().loss_scale
    )
    with pytest.raises(UsageError, match="dynamic_loss_args"):
        CreateLossScaler(torch.half, 4.0, True, None)


def test_small_functions_on_tensors() -> None:
    assert tensor_helpers.prefix_sum_inc([3, 4, 5]) == [3, 7, 12]
    assert tensor_helpers.get_tensor_bytes({"a": [torch.ones(2)], "b": 1}) == 8
    assert [
        t.numel() for t in tensor_helpers.align_dense_tensors([torch.ones(3), torch.ones(2)], 4)
    ] == [3, 2, 3]
    assert len(tensor_helpers.align_dense_tensors([torch.ones(4)], 4)) == 1
    empty = nn.Parameter(torch.ones(0))
    full = nn.Parameter(torch.ones(1))
    assert tensor_helpers.filter_empty_parameters(
        [{"params": [empty]}, {"params": [full], "lr": 1}]
    ) == [{"params": [full], "lr": 1}]
    assert tensor_helpers.is_optimized_parameter(
        full
    ) and not tensor_helpers.is_optimized_parameter(empty)
    with pytest.raises(UsageError, match="one value was expected"):
        tensor_helpers.get_only_unique_item([1, 2])
