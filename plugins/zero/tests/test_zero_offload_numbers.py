"""Offload changes where states rest, not one bit of the result; and what rests elsewhere takes no
memory here.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from ds_testing import run_ranks
from torch import Tensor

from plugins.zero.tests.offload_models import (
    ALL,
    CPU,
    DISK,
    FEW,
    STATES,
    STORE,
    WEIGHTS,
    host_grads,
    make,
    steps,
    trained,
    whole,
)


def difference(
    zero: dict[str, Any], offload: dict[str, Any], dtype: str, gas: int, folder: Path | None = None
) -> float:
    """The largest difference of weights, losses and norm that offload makes, relative to the
    largest weight.
    """
    weights, losses, norm = trained(zero, dtype, gas)
    others, other_losses, other_norm = trained({**zero, **offload}, dtype, gas, folder)
    far = [float((weights[n] - others[n]).abs().max() / weights[n].abs().max()) for n in weights]
    far += [abs(a - b) / abs(a) for a, b in zip(losses, other_losses, strict=True)]
    rounded = 1e-6 if folder is not None else 0.0  # the norm of evicted gradients is one of norms
    return max(*far, 0.0 if abs(norm - other_norm) <= rounded * norm else 1.0)


@pytest.mark.fast_cases(
    "3-offload6-bfloat16-1-4",
    "3-offload10-float16-1-2",
    "2-offload3-float16-1-2",
    "1-offload1-bfloat16-1-2",
)
@pytest.mark.parametrize(
    ("stage", "offload", "dtype", "gas", "world"),
    [
        (1, STATES, "float32", 4, 2),
        (1, STATES, "bfloat16", 1, 2),
        (2, STATES, "float32", 4, 4),
        (2, STATES, "float16", 1, 2),
        (2, STATES, "bfloat16", 1, 1),
        (3, STATES, "float32", 1, 2),
        (3, STATES, "bfloat16", 1, 4),
        (3, WEIGHTS, "float32", 4, 2),
        (3, WEIGHTS, "bfloat16", 4, 2),
        (3, ALL, "float32", 4, 4),
        (3, ALL, "float16", 1, 2),
        (3, {**ALL, "use_all_reduce_for_fetch_params": True}, "float32", 1, 2),
        (3, {**ALL, "max_reuse_distance": 0, "prefetch_bucket_size": 0}, "float32", 1, 2),
        (3, {"offload_optimizer": {**CPU, "ratio": 0.4}}, "float32", 4, 2),
        (3, {"offload_optimizer": {**CPU, "ratio": 0.4}, "offload_param": CPU}, "bfloat16", 1, 2),
    ],
)
def test_offload_changes_no_bit(
    stage: int, offload: dict[str, Any], dtype: str, gas: int, world: int
) -> None:
    assert run_ranks(world, difference, {"stage": stage}, offload, dtype, gas) == [0.0] * world


def undeclared(zero: dict[str, Any], dtype: str) -> tuple[bool, bool]:
    """With an optimizer that is given whole tensors: whether weights are the same, and masters on
    the host's.
    """
    found = []
    for offload in ({}, ALL if zero["stage"] == 3 else STATES):
        engine = make(
            {**zero, **offload},
            dtype=dtype,
            optimizer=lambda groups: torch.optim.AdamW(groups, lr=0.01),
            zero_allow_untested_optimizer=True,
            zero_force_ds_cpu_optimizer=False,
        )
        steps(engine, range(3))
        found.append(whole(engine))
        masters = [
            p.master
            for b in engine.partitioner.buckets
            if b.masters.full_tensors
            for p in b.masters.fragments
            if p.stop
        ]
        weights = {b.full.untyped_storage()._cdata for b in engine.partitioner.buckets}
        weights |= {b.weights.shard.untyped_storage()._cdata for b in engine.partitioner.buckets}
        apart = bool(masters) and all(m.untyped_storage()._cdata not in weights for m in masters)
        engine.destroy()
    return all(torch.equal(found[0][n], found[1][n]) for n in found[0]), apart


@pytest.mark.fast_cases("1-float32-2", "3-float32-4")
@pytest.mark.parametrize(
    ("stage", "dtype", "world"), [(1, "float32", 2), (2, "bfloat16", 4), (3, "float32", 4)]
)
def test_whole_tensors_are_offloaded_too(stage: int, dtype: str, world: int) -> None:
    assert run_ranks(world, undeclared, {"stage": stage}, dtype) == [(True, True)] * world


def undeclared_on_disk(folder: Path) -> str:
    from ds_core.errors import UsageError

    try:
        make(
            {"stage": 3, **DISK},
            folder,
            optimizer=lambda groups: torch.optim.AdamW(groups),
            zero_allow_untested_optimizer=True,
            zero_force_ds_cpu_optimizer=False,
        )
    except UsageError as error:
        return str(error)
    return ""


def test_whole_tensors_need_a_store_that_stays_in_memory(tmp_path: Path) -> None:
    assert "does not keep states in memory" in run_ranks(1, undeclared_on_disk, tmp_path)[0]


def accumulated(accumulate: str) -> list[bool]:
    """Whether weights are those of accumulation on the device in `accumulate`: with offload, and
    without.
    """
    on_host, plain = (trained({"stage": 2, **o}, "bfloat16", 4)[0] for o in (STATES, {}))
    truth = trained({"stage": 2}, "bfloat16", 4, data_types={"grad_accum_dtype": accumulate})[0]
    return [all(torch.equal(found[n], truth[n]) for n in truth) for found in (on_host, plain)]


def test_reduced_gradients_are_added_in_the_precision_of_masters() -> None:
    """16-bit parts of four micro-batches are added in fp32 on the host, as grad_accum_dtype asks
    for on the device.
    """
    assert run_ranks(2, accumulated, "fp32") == [[True, False]] * 2
    assert run_ranks(2, accumulated, "bf16") == [[False, True]] * 2


def test_one_rank_releases_weights_that_rest_on_the_host() -> None:
    """Alone, the arithmetic is stage 0's, and gathered weights leave the device after use."""
    for far, empty in run_ranks(1, alone):
        assert far < 1e-6
        assert empty


def alone() -> tuple[float, bool]:
    weights, losses, norm = trained({"stage": 0}, "float32", 2)
    engine = make({"stage": 3, **ALL}, gradient_accumulation_steps=2)
    other_losses = steps(engine, range(3), 2)
    others = whole(engine)
    units = engine.partitioner.units
    empty = bool(units) and all(u.bucket.full.untyped_storage().nbytes() == 0 for u in units)
    far = max(float((weights[n] - others[n]).abs().max()) for n in weights)
    far = max(far, *(abs(a - b) for a, b in zip(losses, other_losses, strict=True)))
    far = max(far, abs(norm - engine.get_global_grad_norm()))
    engine.destroy()
    return far, empty and all(
        p.numel() == math.prod(p.shape) > 0 for p in engine.module.parameters()
    )


# -- a store that gives memory back ----------------------------------------------------------------


@pytest.mark.fast_cases(
    "3-nvme-float32-4-2-more1",
    "3-disk-float16-1-1-more3",
    "1-disk-bfloat16-4-2-more4",
    "3-cpu-bfloat16-1-2-more10",
)
@pytest.mark.parametrize(
    ("stage", "device", "dtype", "gas", "world", "more"),
    [
        (3, "nvme", "bfloat16", 1, 2, {}),
        (3, "nvme", "float32", 4, 2, {"offload_param": CPU}),
        (3, "disk", "float32", 1, 4, {"ratio": 0.5}),
        (3, "disk", "float16", 1, 1, {}),
        (1, "disk", "bfloat16", 4, 2, {"pipeline_read": True}),
        (2, "disk", "float32", 4, 2, {}),
        (3, "disk", "float32", 4, 2, {"offload_param": FEW}),
        (
            3,
            "disk",
            "float32",
            1,
            4,
            {"offload_param": {**FEW, "max_in_cpu": 300}, "pipeline_read": True},
        ),
        (3, "disk", "bfloat16", 1, 1, {"offload_param": FEW, "pipeline_read": True}),
        (3, "disk", "float16", 1, 2, {"offload_param": FEW, "ratio": 0.5}),
        (3, "cpu", "bfloat16", 1, 2, {"offload_param": FEW}),
        (
            3,
            "none",
            "bfloat16",
            4,
            2,
            {"offload_param": FEW, "use_all_reduce_for_fetch_params": True},
        ),
        (3, "none", "float32", 1, 2, {"offload_param": {**FEW, "buffer_count": 1}}),
    ],
)
def test_states_on_disk_change_no_bit(
    stage: int, device: str, dtype: str, gas: int, world: int, more: dict[str, Any], tmp_path: Path
) -> None:
    keys = ("ratio", "pipeline_read")
    states = {"device": device, **{k: v for k, v in more.items() if k in keys}}
    states |= {"nvme_path": str(tmp_path)} if device == "nvme" else {}
    offload = {"offload_optimizer": states, **{k: v for k, v in more.items() if k not in keys}}
    assert (
        run_ranks(world, difference, {"stage": stage}, offload, dtype, gas, tmp_path)
        == [0.0] * world
    )


def watched(folder: Path) -> dict[str, Any]:
    """What of weights is in memory while steps and an evaluation run, whether reads ran ahead, and
    what was read.
    """
    from ds_zero.buckets.weights import EvictedShard

    far = {"device": "disk", "max_in_cpu": 400, "buffer_count": 2, "buffer_size": 300}
    engine = make(
        {"stage": 3, "offload_param": far, "param_persistence_threshold": 0},
        folder,
        dtype="bfloat16",
    )
    units = engine.partitioner.units
    away = [u.bucket for u in units if u.bucket.weights.evicts is not None]
    kept = [u.bucket for u in units if u.bucket.weights.evicts is None]
    found: dict[str, Any] = {"kept": sum(b.layout.shard_numel for b in kept), "most": 0, "ahead": 0}
    read = EvictedShard.read_ahead

    def spy(self: Any) -> None:
        read(self)
        found["ahead"] += 1
        there = sum(b.weights.shard.untyped_storage().nbytes() // 2 for b in away)
        found["most"] = max(found["most"], there)

    EvictedShard.read_ahead = spy  # type: ignore[method-assign]
    try:
        steps(engine, range(1))
        found["first"] = found["ahead"]
        steps(engine, range(1, 3))
        with torch.no_grad():
            engine(torch.ones(2, 7, dtype=torch.bfloat16))
    finally:
        EvictedShard.read_ahead = read  # type: ignore[method-assign]
    found["between"] = sum(b.weights.shard.untyped_storage().nbytes() for b in away)
    found["away"] = len(away)
    engine.destroy()
    return found


def test_weights_on_disk_leave_the_memory_and_are_read_ahead(tmp_path: Path) -> None:
    for found in run_ranks(2, watched, tmp_path):
        assert found["away"] > 3
        assert 0 < found["kept"] <= 400
        assert found["between"] == 0
        assert found["first"] < found["ahead"]
        assert 300 < found["most"] <= 600  # 2 buffers of 300 elements


def emptied(folder: Path) -> dict[str, Any]:
    """What of masters and moments is in memory: between steps, and at most inside one."""
    engine = make({"stage": 3, "offload_optimizer": {"device": "disk"}}, folder, dtype="bfloat16")
    buckets = [b for b in engine.partitioner.buckets if b.masters.evicts is not None]
    most = 0

    def states() -> list[Tensor]:
        moments = [v for s in engine.optimizer.state.values() for v in s.values() if v.dim()]
        hosts = host_grads(engine)
        return [b.masters.flat for b in buckets] + moments + hosts

    def resident(tensors: list[Tensor]) -> int:
        return sum(
            {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values()
        )

    def watch(*_: Any) -> None:
        nonlocal most
        most = max(most, resident(states()))

    ids = [id(t) for t in (b.masters.flat for b in buckets)]
    engine.optimizer.register_step_post_hook(watch)
    found: dict[str, Any] = {"first": resident(states())}
    steps(engine, range(1))
    kept = {id(v) for s in engine.optimizer.state.values() for v in s.values()}
    steps(engine, range(1, 3))
    found["between"] = resident(states())
    found["total"] = sum(14 * b.layout.shard_numel for b in buckets)
    found["largest"] = max(14 * b.layout.shard_numel for b in buckets)
    found["most"] = most
    found["same"] = ids == [id(b.masters.flat) for b in buckets] and kept == {
        id(v) for s in engine.optimizer.state.values() for v in s.values()
    }
    found["moved"] = engine.partitioner.offload.optimizer.moved["read"]
    engine.destroy()
    return found


def test_states_on_disk_leave_the_memory_between_steps(tmp_path: Path) -> None:
    for found in run_ranks(2, emptied, tmp_path):
        assert found["first"] == found["between"] == 0
        assert 0 < found["most"] <= 2 * found["largest"] < found["total"]
        assert found["same"]
        assert found["moved"] > found["total"]


def clamped(folder: Path) -> bool:
    """Whether a plugin that changes gradients changes evicted ones alike."""
    load = [f"disk={STORE}", "clamp=plugins.zero.tests.clamp"]
    found = [
        trained({"stage": 3, **zero}, "bfloat16", 1, folder, plugins={"load": load})
        for zero in ({}, {"offload_optimizer": {"device": "disk"}})
    ]
    free = trained({"stage": 3}, "bfloat16", 1)
    same = [
        all(torch.equal(found[0][0][n], other[0][n]) for n in found[0][0])
        for other in (found[1], free)
    ]
    return same == [True, False] and found[0][1:] == found[1][1:]


def test_plugins_change_gradients_on_disk(tmp_path: Path) -> None:
    assert run_ranks(2, clamped, tmp_path) == [True, True]


def counting(folder: Path) -> str:
    """An optimizer that counts its steps in its groups would count tiles."""
    from ds_core.errors import UsageError

    engine = make(
        {"stage": 3, "offload_optimizer": {"device": "disk"}},
        folder,
        optimizer_section={"type": "Counting"},
    )
    try:
        steps(engine, range(1))
    except UsageError as error:
        return str(error)
    finally:
        engine.destroy()
    return ""


def test_an_optimizer_that_counts_in_its_groups_is_refused(tmp_path: Path) -> None:
    (told,) = run_ranks(1, counting, tmp_path)
    assert "Counting changes its parameter groups in each step" in told
