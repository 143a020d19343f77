"""`deepspeed.initialize`: ds_core's engine under DeepSpeed's names, which is a module too."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import pytest
import torch
from compat_engines import compat_engine, net
from ds_deepspeed_compat.configs.release_config import as_released
from ds_deepspeed_compat.engines.engine import DeepSpeedEngine, initialize
from torch import nn

import ds_core
from ds_core.config.source import ConfigSource
from ds_core.errors import ConfigError


def test_the_engine_is_a_module_with_one_child() -> None:
    engine = compat_engine()
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
    engine = compat_engine(gradient_accumulation_steps=2, train_batch_size=8)
    for _ in range(4):
        engine.backward(engine(torch.ones(4, 4)).sum())
        engine.step()
    assert engine.tput_timer.global_step_count == engine.global_steps == 2
    assert engine.tput_timer.micro_step_count == 4
    engine.tput_timer.update_epoch_count()
    assert engine.random_ltd_scheduler is None
    engine.destroy()


def test_keys_that_are_like_none_are_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    compat_engine(cuda_visible_devices="0,1").destroy()
    assert "config: cuda_visible_devices: no such keys, and like none; passed over" in caplog.text
    for name, fix in (
        ("gradient_cliping", "did you mean 'gradient_clipping'"),
        ("loss_scale_window", "belongs in"),
    ):
        with pytest.raises(ConfigError, match=fix):
            compat_engine(**{name: 1})
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
    engine = compat_engine(model, compression_training=section)
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
    engine = compat_engine()
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

    engine = compat_engine(zero_optimization={"stage": 3})
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
    engine = compat_engine(
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
    plain = compat_engine()
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
    engine = compat_engine(
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
    compat_engine(**{"zero_optimization.reduce_bucket_size": 5.5})
    assert "zero_optimization.reduce_bucket_size: no such keys" in caplog.text
    with pytest.raises(ConfigError, match="optimizer.params.lr"):
        compat_engine(optimizer={"type": "AdamW", "params": {"lr": "auto"}})


def test_gradients_are_clipped_as_the_config_says_or_at_1(tmp_path: Path) -> None:
    assert compat_engine(gradient_clipping=0.5).gradient_clipping() == 0.5
    assert compat_engine(fp16={"enabled": True, "clip": 0.5}).gradient_clipping() == 0.5
    assert compat_engine().gradient_clipping() == 1.0
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
        made = compat_engine(optimizer={"type": kind, "params": {"lr": 0.1, **params}})
        return made.optimizer.param_groups[0]["weight_decay"]  # type: ignore[no-any-return]

    assert decay("AdamW", torch_adam=True) == decay("Adam", torch_adam=True) == 0.01
    assert decay("AdamW") == decay("AdamW", torch_adam=True, weight_decay=0.0) == 0.0
    assert decay("Adam", torch_adam=True, adam_w_mode=False) == 0.0


def test_the_flops_profiler_turns_the_wall_clock_breakdown_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from ds_flops_profiler import FlopsProfiler

    assert not compat_engine().wall_clock_breakdown()
    engine = compat_engine(flops_profiler={"enabled": True, "profile_step": 5})
    assert engine.wall_clock_breakdown() and engine.flops_profiler_enabled()
    profiler = FlopsProfiler(engine, engine)
    profiler.start_profile()
    engine(torch.ones(2, 4))
    profiler.print_model_profile(profile_step=3)
    assert profiler.get_total_macs() == 2 * (16 + 4)
    profiler.end_profile()
    assert "flops profiler: step 3" in capsys.readouterr().out


def test_what_a_checkpoint_was(tmp_path: Path) -> None:
    engine = compat_engine()
    engine.save_checkpoint(str(tmp_path), client_state={"a": 1})
    assert engine.loaded_checkpoint_tag is None
    assert engine.load_checkpoint(str(tmp_path))[1] == {"a": 1}
    assert engine.loaded_checkpoint_tag == "global_step0"
    assert "exclude_frozen_parameters" in inspect.signature(engine.save_checkpoint).parameters
    assert "load_module_strict" in inspect.signature(engine.load_checkpoint).parameters


def test_weights_of_the_module() -> None:
    engine = compat_engine()
    engine.module[0].weight.requires_grad_(False)
    assert "0.weight" not in engine.module_state_dict(exclude_frozen_parameters=True)
    new = {name: torch.zeros_like(value) for name, value in engine.module_state_dict().items()}
    engine.load_module_state_dict({"module": new})
    assert not engine.module[2].bias.detach().any()
    with pytest.raises(RuntimeError, match="Missing key"):
        engine.load_module_state_dict({})
