"""``deepspeed.DeepSpeedConfig`` and the config models."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ds_deepspeed_compat.configs import config_models, section_defaults
from ds_deepspeed_compat.configs.deepspeed_config import DeepSpeedConfig
from pydantic import ValidationError

from ds_core.errors import ConfigError

CONFIG: dict[str, Any] = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 4,
    "fp16": {"enabled": True, "initial_scale_power": 8},
    "communication_data_type": "fp32",
    "gradient_clipping": 0.5,
    "steps_per_print": float("inf"),
    "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "betas": "auto"}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3}},
    "zero_optimization": {"stage": 3, "cpu_offload": True, "stage3_prefetch_bucket_size": 5e6},
    "csv_monitor": {"enabled": True},
    "checkpoint": {"tag_validation": "fail"},
    "wandb": {"enabled": False},
    "compile": {},
}


def test_the_config_is_flat() -> None:
    config: Any = DeepSpeedConfig(
        CONFIG, mpu=SimpleNamespace(get_data_parallel_world_size=lambda: 4)
    )
    assert (config.world_size, config.global_rank) == (4, 0)
    assert (config.train_batch_size, config.train_micro_batch_size_per_gpu) == (64, 4)
    assert config.gradient_accumulation_steps == 4
    assert (config.optimizer_name, config.optimizer_params) == ("adamw", {"lr": 0.1})
    assert (config.scheduler_name, config.scheduler_params) == ("WarmupLR", {"warmup_num_steps": 3})
    assert (config.gradient_clipping, config.steps_per_print, config.wall_clock_breakdown) == (
        0.5,
        None,
        False,
    )
    assert config.communication_data_type is torch.float32
    assert (config.zero_enabled, config.zero_optimization_stage) == (True, 3)
    assert (config.zero_config.prefetch_bucket_size, config.zero_config.overlap_comm) == (
        5_000_000,
        True,
    )
    assert config.zero_config.offload_optimizer.device == "cpu"
    assert (
        config.fp16_enabled,
        config.bfloat16_enabled,
        config.float16_config.initial_scale_power,
    ) == (True, False, 8)
    assert config.initial_dynamic_scale == 256
    assert config.dynamic_loss_scale_args["init_scale"] == 256
    assert (config.checkpoint_tag_validation_enabled, config.checkpoint_tag_validation_fail) == (
        True,
        True,
    )
    assert config.monitor_config.enabled and not config.monitor_config.wandb.enabled
    assert config.flops_profiler_config.module_depth == -1
    assert config.pipeline["partition"] == "best"

    config.gradient_accumulation_steps = 7
    config.zero_config.stage = 1
    assert CONFIG["zero_optimization"]["stage"] == 3


def test_every_form_of_config_is_taken(tmp_path: Path) -> None:
    given = {"train_batch_size": 8}
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(given))
    text = base64.urlsafe_b64encode(json.dumps(given).encode()).decode()
    assert [
        DeepSpeedConfig(form).train_micro_batch_size_per_gpu for form in (given, str(file), text)
    ] == [8, 8, 8]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"train_batch_size": 6, "train_micro_batch_size_per_gpu": 4}, "train_batch_size 6 is not"),
        ({"zero_optimization": {"stage": 1}}, "a batch size is needed"),
        (
            {"train_batch_size": 8, "zero_optimization": {"stgae": 1}},
            "did you mean 'zero_optimization.stage'",
        ),
        ({"train_batch_size": 8, "nebula": {"enabled": True}}, "not offered"),
    ],
)
def test_errors_are_those_of_a_run(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        DeepSpeedConfig(given)


def test_models_have_the_sections_defaults_and_check_what_is_set() -> None:
    zero = config_models.get_zero_config(
        {"zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"}}
    )
    assert (zero.reduce_bucket_size, zero.overlap_comm, zero.offload_optimizer) == (
        500_000_000,
        False,
        None,
    )
    zero.stage = 1
    zero.offload_optimizer = {"device": "cpu"}
    zero.offload_optimizer.pin_memory = True
    zero.leaf_module.names = ["block"]
    assert config_models.get_zero_config({}).leaf_module.names == []
    with pytest.raises(ValidationError):
        zero.stage = 7
    with pytest.raises(ValidationError, match="stagee"):
        type(zero)(stagee=1)
    assert config_models.get_bfloat16_config({"bfloat16": {"enabled": True}}).enabled
    for key, value in {"at_start": True, "backend": "eager", "deepcompile": True}.items():
        read = DeepSpeedConfig({"train_batch_size": 1, "compile": {key: value}})
        assert getattr(read.compile_config, key) == value
    assert DeepSpeedConfig({"train_batch_size": 1}).hybrid_engine.max_out_tokens == 512
    assert (
        section_defaults.get_aio_config({"aio": {"thread_count": 4}})["intra_op_parallelism"] == 4
    )


@pytest.fixture
def deepspeed() -> Iterator[Any]:
    import importlib
    import sys

    from ds_deepspeed_compat import install
    from ds_deepspeed_compat.finder import FINDER

    install()
    yield importlib.import_module("deepspeed")
    sys.meta_path.remove(FINDER)
    for name in [n for n in sys.modules if n.partition(".")[0] == "deepspeed"]:
        del sys.modules[name]


def test_a_model_has_one_class_at_every_path(deepspeed: Any) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig as Flat  # type: ignore[import-not-found]
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig  # type: ignore[import-not-found]
    from deepspeed.runtime.zero.offload_config import (  # type: ignore[import-not-found]
        DeepSpeedZeroOffloadOptimizerConfig,
    )

    zero = DeepSpeedConfig(
        {"train_batch_size": 1, "zero_optimization": {"stage": 1, "cpu_offload": True}}
    ).zero_config
    assert Flat is deepspeed.DeepSpeedConfig is DeepSpeedConfig
    assert isinstance(zero, DeepSpeedZeroConfig)
    assert isinstance(zero.offload_optimizer, DeepSpeedZeroOffloadOptimizerConfig)
    assert type(zero.offload_optimizer) is DeepSpeedZeroOffloadOptimizerConfig
