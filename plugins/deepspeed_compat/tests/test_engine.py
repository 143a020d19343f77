"""`deepspeed.initialize`: ds_core's engine under DeepSpeed's names, which is a module too."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ds_access import safe_get_full_grad
from ds_deepspeed_compat.configs.release_config import as_released
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
from ds_core.config.source import ConfigSource
from ds_core.errors import ConfigError, UsageError


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def start(model: nn.Module | None = None, **config: Any) -> Any:
    given = {"train_batch_size": 4, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}} | config
    return initialize(model=model or net(), config=given)[0]


def test_the_engine_is_a_module_with_one_child() -> None:
    engine = start()
    assert isinstance(engine, nn.Module)
    assert isinstance(engine.core, ds_core.Engine)
    assert type(engine) is DeepSpeedEngine
    assert [name for name, _ in engine.named_parameters()][:2] == [
        "module.0.weight",
        "module.0.bias",
    ]
    assert list(engine.parameters()) == list(engine.module.parameters())
    assert engine.state_dict().keys() == {f"module.{name}" for name in engine.module.state_dict()}
    assert list(engine.children()) == [engine.module]
    engine.load_state_dict(engine.state_dict())
    assert engine.eval() is engine
    assert not engine.training
    assert not engine.module.training
    seen: list[Any] = []
    engine.register_forward_hook(lambda module, inputs, output: seen.append(output))
    output = engine(torch.ones(4, 4))
    assert seen[0] is output
    assert engine.get_submodule("module.0") is engine.module[0]
    engine.destroy()
    with pytest.raises(RuntimeError, match="destroyed"):
        engine(torch.ones(4, 4))


def test_the_throughput_of_the_engines_steps() -> None:
    engine = start(gradient_accumulation_steps=2, train_batch_size=8)
    for _ in range(4):
        engine.backward(engine(torch.ones(4, 4)).sum())
        engine.step()
    assert engine.tput_timer.global_step_count == engine.global_steps == 2
    assert engine.tput_timer.micro_step_count == 4
    engine.tput_timer.update_epoch_count()
    assert engine.random_ltd_scheduler is None
    engine.destroy()


def test_keys_that_are_like_none_are_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    start(cuda_visible_devices="0,1").destroy()
    assert "config: cuda_visible_devices: no such keys, and like none; passed over" in caplog.text
    for name, fix in (
        ("gradient_cliping", "did you mean 'gradient_clipping'"),
        ("loss_scale_window", "belongs at"),
    ):
        with pytest.raises(ConfigError, match=fix):
            start(**{name: 1})
    with pytest.raises(ConfigError, match="cuda_visible_devices"):
        ds_core.initialize(model=net(), config={"train_batch_size": 4, "cuda_visible_devices": "0"})


def test_only_models_that_init_compression_had_are_compressed() -> None:
    """A teacher gets its student's config, with layer_reduction, and stays as it is."""
    reduction = {
        "enabled": True,
        "keep_number_layer": 1,
        "module_name_prefix": "",
        "teacher_layer": [0],
    }
    bits = {"shared_parameters": {"enabled": True}, "different_groups": {}}
    bits["different_groups"]["g"] = {
        "params": {"start_bits": 2, "target_bits": 2},
        "modules": ["*"],
    }
    section = {"layer_reduction": reduction, "weight_quantization": bits}
    model = net()
    engine = start(model, compression_training=section)
    assert type(model[0]) is nn.Linear
    assert torch.equal(engine(torch.ones(4, 4)), net()(torch.ones(4, 4)))
    engine.destroy()


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        (
            {
                "train_batch_size": 16,
                "train_micro_batch_size_per_gpu": 2,
                "gradient_accumulation_steps": 2,
            },
            (2, 2),
        ),
        ({"train_batch_size": 16, "train_micro_batch_size_per_gpu": 2}, (2, 2)),
        ({"train_batch_size": 16, "gradient_accumulation_steps": 2}, (2, 2)),
        (
            {
                "train_batch_size": 8,
                "train_micro_batch_size_per_gpu": 2,
                "gradient_accumulation_steps": 2,
            },
            None,
        ),
        ({"train_micro_batch_size_per_gpu": 2}, None),
    ],
)
def test_batches_of_divided_layers_are_counted_as_the_release_counts(
    given: dict[str, int], taken: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setattr(ds_core.comm, "is_initialized", lambda: False)
    config = {**given, "tensor_parallel": {"autotp_size": 2}}
    read = as_released(ConfigSource(config, "here")).raw
    if taken is None:
        assert read == config
    else:
        assert "train_batch_size" not in read
        assert (
            read["train_micro_batch_size_per_gpu"],
            read["gradient_accumulation_steps"],
        ) == taken


def test_backward_takes_its_arguments_in_the_order_of_the_release() -> None:
    engine = start()
    loss = engine(torch.ones(4, 4)).square().mean()
    engine.backward(loss, True)
    engine.backward(loss, False, False)  # the graph is still there
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    engine.backward(
        engine(torch.ones(4, 4)).square().mean(), allreduce_gradients=True, release_loss=True
    )
    engine.destroy()


def test_functions_that_take_an_engine_take_this_one() -> None:
    from ds_zero import empty_partition_cache, get_state_devices, unwrap_model_for_generation

    engine = start(zero_optimization={"stage": 3})
    for one in (engine, engine.core, engine.module):
        assert get_state_devices(one, "lp_params") == {torch.device("cpu")}
    empty_partition_cache(engine)
    with unwrap_model_for_generation(engine) as module:
        module(torch.ones(4, 4))
    engine.destroy()


def test_it_trains_as_ds_cores_engine_does() -> None:
    def train(make: Any) -> list[float]:
        config = {"train_batch_size": 4, "optimizer": {"type": "AdamW"}}
        engine, *_ = make(model=net(), config=config)
        losses = []
        for _ in range(3):
            loss = engine(torch.linspace(0, 1, 16).view(4, 4)).square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        return losses

    assert train(initialize) == train(ds_core.initialize)
    shown = (
        list(inspect.signature(function).parameters)
        for function in (initialize, ds_core.initialize)
    )
    assert next(shown) == next(shown)


def test_getters_read_the_config() -> None:
    engine = start(
        bf16={"enabled": True},
        gradient_clipping=0.5,
        zero_optimization={
            "stage": 3,
            "stage3_param_persistence_threshold": 7,
            "offload_optimizer": {"device": "cpu"},
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 5}},
    )
    assert (engine.bfloat16_enabled(), engine.fp16_enabled()) == (True, False)
    assert (engine.zero_optimization_stage(), engine.zero_optimization()) == (3, True)
    assert engine.zero_param_persistence_threshold() == 7
    assert (engine.zero_cpu_offload(), engine.zero_nvme_offload_optimizer()) == (True, False)
    assert engine.zero_gather_16bit_weights_on_model_save()
    assert engine.gradient_clipping() == 0.5
    assert (engine.optimizer_name(), engine.scheduler_name()) == ("adamw", "WarmupLR")
    assert (engine._config.zero_optimization_stage, engine._config.train_batch_size) == (3, 4)
    assert engine._config is engine._config
    assert engine.scheduler_params() == {"warmup_num_steps": 5}
    assert engine.get_data_types() == (torch.bfloat16, torch.bfloat16)
    plain = start()
    assert (plain.zero_optimization_stage(), plain.zero_optimization_partition_weights()) == (
        0,
        False,
    )
    assert plain.zero_reduce_bucket_size() == 500_000_000
    assert (plain.local_rank, plain.dp_world_size, plain.mp_world_size) == (0, 1, 1)
    # as with DeepSpeed: fp32 at stage 0 has no wrapper
    assert plain.basic_optimizer is plain.optimizer
    plain.config["optimizer"]["type"] = "SGD"
    assert plain.optimizer_name() == "adamw"
    plain.lr_scheduler = schedule = torch.optim.lr_scheduler.LambdaLR(
        plain.optimizer, lambda _: 1.0
    )
    assert plain.core.lr_scheduler is schedule
    plain.mine = 4
    assert (plain.mine, hasattr(plain.core, "mine")) == (4, False)


def test_what_front_ends_leave_in_a_config(caplog: pytest.LogCaptureFixture) -> None:
    engine = start(
        zero_optimization={
            "stage": 3,
            "reduce_bucket_size": "auto",
            "offload_param": {"device": "none"},
        }
    )
    assert engine.zero_reduce_bucket_size() == 500_000_000
    assert (
        'zero_optimization.reduce_bucket_size: "auto" was not filled in; the default is taken'
        in caplog.text
    )
    start(**{"zero_optimization.reduce_bucket_size": 5.5})
    assert "zero_optimization.reduce_bucket_size: no such keys" in caplog.text
    with pytest.raises(ConfigError, match="optimizer.params.lr"):
        start(optimizer={"type": "AdamW", "params": {"lr": "auto"}})


def test_gradients_are_clipped_as_the_config_says_or_at_1(tmp_path: Path) -> None:
    assert start(gradient_clipping=0.5).gradient_clipping() == 0.5
    assert start(fp16={"enabled": True, "clip": 0.5}).gradient_clipping() == 0.5
    assert start().gradient_clipping() == 1.0
    file = tmp_path / "ds_config.json"
    file.write_text('{"train_batch_size": 4, "optimizer": {"type": "AdamW"}}')
    for args in (
        SimpleNamespace(deepspeed_config=str(file), local_rank=-1),
        {"deepspeed_config": str(file)},
    ):
        engine, *_ = initialize(args=args, model=torch.nn.Linear(2, 1))
        assert engine.gradient_clipping() == 1.0 and engine.train_batch_size() == 4
    with pytest.raises(ConfigError, match="both given"):
        initialize(args=args, model=torch.nn.Linear(2, 1), config=str(file))
    with pytest.raises(ConfigError, match="no config was given"):
        initialize(model=torch.nn.Linear(2, 1))


def test_torchs_adamw_has_torchs_weight_decay() -> None:
    def decay(kind: str, **params: Any) -> float:
        made = start(optimizer={"type": kind, "params": {"lr": 0.1, **params}})
        return made.optimizer.param_groups[0]["weight_decay"]  # type: ignore[no-any-return]

    assert decay("AdamW", torch_adam=True) == decay("Adam", torch_adam=True) == 0.01
    assert decay("AdamW") == decay("AdamW", torch_adam=True, weight_decay=0.0) == 0.0
    assert decay("Adam", torch_adam=True, adam_w_mode=False) == 0.0


def test_the_flops_profiler_turns_the_wall_clock_breakdown_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from ds_flops_profiler import FlopsProfiler

    assert not start().wall_clock_breakdown()
    engine = start(flops_profiler={"enabled": True, "profile_step": 5})
    assert engine.wall_clock_breakdown() and engine.flops_profiler_enabled()
    profiler = FlopsProfiler(engine, engine)
    profiler.start_profile()
    engine(torch.ones(2, 4))
    profiler.print_model_profile(profile_step=3)
    assert profiler.get_total_macs() == 2 * (16 + 4)
    profiler.end_profile()
    assert "flops profiler: step 3" in capsys.readouterr().out


def test_what_a_checkpoint_was(tmp_path: Path) -> None:
    engine = start()
    engine.save_checkpoint(str(tmp_path), client_state={"a": 1})
    assert engine.loaded_checkpoint_tag is None
    assert engine.load_checkpoint(str(tmp_path))[1] == {"a": 1}
    assert engine.loaded_checkpoint_tag == "global_step0"
    assert "exclude_frozen_parameters" in inspect.signature(engine.save_checkpoint).parameters
    assert "load_module_strict" in inspect.signature(engine.load_checkpoint).parameters


def test_weights_of_the_module() -> None:
    engine = start()
    engine.module[0].weight.requires_grad_(False)
    assert "0.weight" not in engine.module_state_dict(exclude_frozen_parameters=True)
    new = {name: torch.zeros_like(value) for name, value in engine.module_state_dict().items()}
    engine.load_module_state_dict({"module": new})
    assert not engine.module[2].bias.detach().any()
    with pytest.raises(RuntimeError, match="Missing key"):
        engine.load_module_state_dict({})


FP16 = {"fp16": {"enabled": True, "initial_scale_power": 4, "hysteresis": 1}}


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
    engine = start(zero_optimization=offload, train_batch_size=8, train_micro_batch_size_per_gpu=4)
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
        == start(zero_optimization={"stage": 1}).optimizer.accumulated_grads_in_cpu
        == {}
    )
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 1))
    set_z3_leaf_module(model[0], True)
    engine = start(model, zero_optimization={"stage": 3})
    assert engine.optimizer.leaf_parameters == {model[0]: list(model[0].parameters())}


def test_a_pipelines_engine() -> None:
    module = PipelineModule(
        [LayerSpec(nn.Linear, 4, 4), LayerSpec(nn.Linear, 4, 1)], num_stages=1, loss_fn=nn.MSELoss()
    )
    engine = start(module, train_batch_size=2, train_micro_batch_size_per_gpu=1)
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
    assert not isinstance(start(), PipelineEngine)
    batch = torch.ones(1, 4), torch.ones(1, 1)
    assert engine.train_batch(iter([batch, batch])).item() > 0


def test_members_are_there_as_the_table_says() -> None:
    layers = [LayerSpec(nn.Linear, 4, 4), LayerSpec(nn.Linear, 4, 1)]
    pipeline = start(PipelineModule(layers, num_stages=1, loss_fn=nn.MSELoss()))
    plain = start(zero_optimization={"stage": 3})
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
    engine = start(zero_optimization={"stage": 3, "stage3_param_persistence_threshold": 0})
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
