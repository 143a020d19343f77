"""What engines and their optimizers have, as the table of names says it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import pytest
import torch
from compat_engines import FP16, compat_engine, net
from ds_access import safe_get_full_grad
from ds_deepspeed_compat.engines import optimizer
from ds_deepspeed_compat.engines.engine import DeepSpeedEngine, PipelineEngine, initialize
from ds_deepspeed_compat.engines.loss_scaler import DynamicLossScaler
from ds_deepspeed_compat.names.entry import Name, State
from ds_deepspeed_compat.names.members import MEMBERS
from ds_pipeline import LayerSpec, PipelineModule
from ds_testing import run_ranks
from ds_zero import set_z3_leaf_module
from torch import nn

import ds_core
from ds_core.errors import UsageError


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        (optimizer.FP16_Optimizer, FP16),
        (optimizer.BF16_Optimizer, {"bf16": {"enabled": True}}),
        (optimizer.DeepSpeedZeroOptimizer, {"zero_optimization": {"stage": 2}}),
        (optimizer.DeepSpeedZeroOptimizer_Stage3, {"zero_optimization": {"stage": 3}} | FP16),
    ],
)
def test_the_optimizer_is_torchs_in_a_class_that_tells_its_kind(
    kind: type, config: dict[str, Any]
) -> None:
    engine, made, _, _ = initialize(
        model=net(),
        config={"train_batch_size": 4, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}
        | config,
    )
    assert type(made) is kind
    assert made is engine.optimizer
    assert isinstance(made, torch.optim.Optimizer)
    assert isinstance(made, optimizer.DeepSpeedOptimizer)
    assert isinstance(made, optimizer.ZeROOptimizer) == (kind is not optimizer.FP16_Optimizer)
    inner = engine.core.optimizer
    assert made.optimizer is inner
    assert made.param_groups is inner.param_groups
    assert made.state is inner.state
    assert made.defaults == inner.defaults
    assert made.bit16_groups == [list(engine.module.parameters())]
    assert made.clip_grad == 1.0
    schedule = torch.optim.lr_scheduler.LambdaLR(made, lambda step: 0.5**step)
    half = (
        torch.float16
        if engine.fp16_enabled()
        else torch.bfloat16
        if engine.bfloat16_enabled()
        else torch.float32
    )
    for huge, scale in ((1.0, 16.0), (1e30, 8.0)):
        loss = engine(torch.ones(4, 4, dtype=half)).float().square().mean() * huge
        engine.backward(loss)
        engine.step()
        schedule.step()
        if engine.fp16_enabled():
            assert (made.overflow, made.cur_scale, engine.loss_scale()) == (huge > 1, scale, 0.0)
            assert isinstance(made.loss_scaler, DynamicLossScaler)
            assert made.loss_scaler.loss_scale == scale
    assert inner.param_groups[0]["lr"] == pytest.approx(0.025)
    engine.backward(engine(torch.ones(4, 4, dtype=half)).float().square().mean())
    made.step()  # as Fabric does
    assert engine.global_steps == 3
    with pytest.raises(UsageError, match=r"then engine\.step"):
        made.step(lambda: 0.0)
    made.load_state_dict(made.state_dict())
    made.zero_grad()


def test_groups_and_what_lists_hooks() -> None:
    model: Any = net()
    groups = [{"params": model[0].parameters(), "lr": 0.5}, {"params": list(model[2].parameters())}]
    engine: Any = initialize(
        model=model,
        model_parameters=groups,
        config={
            "train_batch_size": 4,
            "optimizer": {"type": "AdamW"},
            "zero_optimization": {"stage": 3},
        },
    )[0]
    assert [len(group) for group in engine.optimizer.bit16_groups] == [2, 2]
    assert [group["lr"] for group in engine.optimizer.param_groups] == [0.5, 1e-3]
    offload = engine.optimizer.parameter_offload
    names = [name for name, _ in offload.module.named_parameters(recurse=True)]
    assert names == [name for name, _ in engine.module.named_parameters()]
    assert (offload.forward_hooks, list(offload.module.ds_external_parameters())) == ([], [])
    for param in [*model[0].parameters(), *model[2].parameters()]:
        assert param.ds_shape.numel() == param.ds_numel
        assert param.ds_status.name == "AVAILABLE"
        assert (param.ds_persist, param.ds_active_sub_modules) == (True, set())


def test_gradients_on_the_host_and_leaf_modules() -> None:
    offload = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    engine = compat_engine(
        zero_optimization=offload, train_batch_size=8, train_micro_batch_size_per_gpu=4
    )
    weight = engine.module[2].weight
    for _ in range(2):
        loss = engine(torch.ones(4, 4)).square().mean()
        engine.backward(loss)
    grads = engine.optimizer.accumulated_grads_in_cpu
    assert sorted(grads) == [0, 1, 2, 3, 4, 5]
    assert (
        grads[4].tolist()
        == pytest.approx(safe_get_full_grad(weight).flatten().tolist())
        != [0.0] * 4
    )
    engine.optimizer.zero_grad()
    assert (
        engine.optimizer.accumulated_grads_in_cpu
        == compat_engine(zero_optimization={"stage": 1}).optimizer.accumulated_grads_in_cpu
        == {}
    )
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 1))
    set_z3_leaf_module(model[0], True)
    engine = compat_engine(model, zero_optimization={"stage": 3})
    assert engine.optimizer.leaf_parameters == {model[0]: list(model[0].parameters())}


def test_a_pipelines_engine() -> None:
    module = PipelineModule(
        [LayerSpec(nn.Linear, 4, 4), LayerSpec(nn.Linear, 4, 1)], num_stages=1, loss_fn=nn.MSELoss()
    )
    engine = compat_engine(module, train_batch_size=2, train_micro_batch_size_per_gpu=1)
    assert isinstance(engine, PipelineEngine)
    assert isinstance(engine, DeepSpeedEngine)
    assert (engine.num_stages, engine.stage_id, engine.micro_batches) == (1, 0, 2)
    assert (
        engine.prev_stage,
        engine.next_stage,
        engine.is_data_parallel,
        engine.is_model_parallel,
    ) == (
        -1,
        1,
        False,
        False,
    )
    assert engine.grid is engine.mpu is module.mpu()
    assert engine.grid.is_first_stage is engine.grid.is_last_stage is True
    assert not isinstance(compat_engine(), PipelineEngine)
    batch = torch.ones(1, 4), torch.ones(1, 1)
    assert engine.train_batch(iter([batch, batch])).item() > 0


def test_members_are_there_as_the_table_says() -> None:
    layers = [LayerSpec(nn.Linear, 4, 4), LayerSpec(nn.Linear, 4, 1)]
    pipeline = compat_engine(PipelineModule(layers, num_stages=1, loss_fn=nn.MSELoss()))
    plain = compat_engine(zero_optimization={"stage": 3})
    objects = {
        "deepspeed.DeepSpeedEngine": plain,
        "deepspeed.PipelineEngine": pipeline,
        "deepspeed.pipe.PipelineModule": pipeline.module,
        "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3": plain.optimizer,
    }
    assert objects.keys() == MEMBERS.keys()
    for path, rows in MEMBERS.items():
        for names, row in rows.items():
            assert isinstance(row, Name)
            for name in names.split():
                assert hasattr(objects[path], name) == (row.state is not State.MISSING), (
                    f"{path}.{name}"
                )


def consolidated() -> tuple[Any, list[float]]:
    engine = compat_engine(zero_optimization={"stage": 3, "stage3_param_persistence_threshold": 0})
    rank = ds_core.comm.rank()
    state = engine._zero3_consolidated_16bit_state_dict()
    assert (state is None) == (rank != 0)
    engine.module[0].bias.requires_grad_(False)
    fewer = engine._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=True)
    groups = __import__("ds_deepspeed_compat.utils.groups", fromlist=["x"])
    alone = groups._get_sequence_parallel_group()
    assert (
        alone.size(),
        groups._get_data_parallel_rank(),
        groups._get_expert_data_parallel_world_size(),
    ) == (
        1,
        rank,
        2,
    )
    if state is None:
        return None, []
    assert state.keys() - fewer.keys() == {"0.bias"}
    return {k: tuple(v.shape) for k, v in state.items()}, state["0.weight"].flatten().tolist()


def test_stage_3_is_gathered_on_the_first_rank() -> None:
    (shapes, weight), _ = run_ranks(2, consolidated)
    assert shapes == {name: tuple(value.shape) for name, value in net().state_dict().items()}
    assert weight == net()[0].weight.flatten().tolist()  # type: ignore[index, union-attr, operator]
