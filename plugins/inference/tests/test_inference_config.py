"""The config of `init_inference`: every documented field, alias, default and error."""

from __future__ import annotations

import json
import logging
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from ds_inference import DeepSpeedInferenceConfig, default_inference_config, init_inference
from ds_inference.init import make_config

from ds_core import reset
from ds_core.errors import ConfigError

DEFAULTS: dict[str, Any] = {
    "replace_with_kernel_inject": False,
    "dtype": "fp16",
    "enable_cuda_graph": False,
    "use_triton": False,
    "triton_autotune": False,
    "zero": {},
    "triangular_masking": True,
    "keep_module_on_host": False,
    "checkpoint": None,
    "base_dir": "",
    "set_empty_params": False,
    "save_mp_checkpoint_path": None,
    "return_tuple": True,
    "training_mp_size": 1,
    "replace_method": "auto",
    "injection_policy": None,
    "injection_policy_tuple": None,
    "config": None,
    "max_out_tokens": 1024,
    "min_out_tokens": 1,
    "transposed_mode": False,
}
BITS = {"enabled": True, "num_bits": 8, "q_type": "symmetric", "q_groups": 1}
NESTED: dict[str, dict[str, Any]] = {
    "tensor_parallel": {"enabled": True, "tp_size": 1, "tp_grain_size": 64, "mpu": None, "tp_group": None},
    "moe": {
        "enabled": True, "ep_size": 1, "moe_experts": [1], "type": "standard", "ep_mp_group": None, "ep_group": None,
    },
    "checkpoint_config": {"checkpoint_dir": None, "save_mp_checkpoint_path": None, "base_dir": None},
}  # fmt: skip


def test_defaults_are_the_documented_ones() -> None:
    found = default_inference_config()
    assert {k: found[k] for k in DEFAULTS} == DEFAULTS
    assert {k: found[k] for k in NESTED} == NESTED
    weight = dict(found["quant"]["weight"])
    assert (
        weight.pop("quantized_initialization"),
        weight.pop("post_init_quant"),
        weight.pop("group_size"),
    ) == (
        {},
        {},
        None,
    )
    assert weight == found["quant"]["activation"] == BITS
    assert (found["quant"]["enabled"], found["quant"]["qkv"]) == (True, {"enabled": True})


@pytest.mark.parametrize(
    ("given", "where", "value"),
    [
        ({"kernel_inject": True}, "replace_with_kernel_inject", True),
        ({"tp": {"tp_size": 2}}, "tensor_parallel.tp_size", 2),
        ({"tm": False}, "triangular_masking", False),
        ({"moe": False}, "moe.enabled", False),
        ({"moe": {"num_experts": [4]}}, "moe.moe_experts", [4]),
        ({"ckpt_config": {"base_dir": "x"}}, "root", "x"),
        ({"ckpt_config": {"checkpoint_dir": "x"}}, "weights", "x"),
        ({"injection_dict": {"Layer": "o"}}, "injection_policy", {"Layer": "o"}),
        ({"args": {"max_tokens": 9}}, "max_out_tokens", 9),
        ({"config": {"dtype": "int8"}}, "bits", 8),
        ({"min_tokens": 3}, "min_out_tokens", 3),
        ({"dtype": torch.half}, "dtype", "fp16"),
        ({"dtype": torch.bfloat16}, "dtype", "bf16"),
        ({"dtype": torch.int8}, "floats", "bfloat16"),
        ({"dtype": "float"}, "dtype", "fp32"),
        ({"dtype": Enum("Dtype", {"a": (torch.float32, "fp32")})["a"]}, "dtype", "fp32"),
        ({"dtype": "int8", "quant": {"weight": {"num_bits": 4}}}, "bits", 4),
        (
            {"dtype": "int8", "quant": {"weight": {"q_type": "asymmetric"}}},
            "quant.weight.q_type",
            "asymmetric",
        ),
        # deprecated
        ({"mp_size": 2}, "tensor_parallel.tp_size", 2),
        ({"mp_size": 2, "tp": {"tp_size": 2}}, "tensor_parallel.tp_size", 2),
        ({"mp_size": 2, "tp": {"tp_grain_size": 8}}, "tensor_parallel.tp_grain_size", 8),
        ({"mpu": "unit"}, "tensor_parallel.mpu", "unit"),
        ({"ep_size": 2}, "moe.ep_size", 2),
        ({"moe": True, "expert_group": "group"}, "moe.ep_group", "group"),
        ({"ep_mp_group": "group"}, "moe.ep_mp_group", "group"),
        ({"moe_experts": 8}, "moe.moe_experts", [8]),
        ({"moe_type": "residual"}, "moe.type", "residual"),
    ],
)
def test_every_spelling(given: dict[str, Any], where: str, value: Any) -> None:
    found: Any = make_config(given)
    for key in where.split("."):
        found = getattr(found, key)
    assert found == value


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"dtyp": "fp16"}, "did you mean 'dtype'"),
        ({"tensor_parallel": {"tp_siz": 2}}, "tensor_parallel.tp_siz"),
        ({"dtype": "fp8"}, "dtype"),
        ({"mp_size": 2, "tp": {"tp_size": 4}}, "is the old name of tensor_parallel.tp_size"),
        ({"quant": {"weight": {"num_bits": 3}}}, "quant.weight.num_bits"),
        ({"quant": {"weight": {"post_init_quant": {"mlp": {"num_bits": 5}}}}}, "num_bits"),
        ({"min_out_tokens": 9, "max_out_tokens": 8}, "min_out_tokens 9 is more than"),
        ({"set_empty_params": True}, "name the weights with checkpoint"),
        ({"base_dir": "a", "checkpoint_config": {"base_dir": "b"}}, "give one of them"),
        ({"max_out_tokens": 0}, "max_out_tokens"),
        ({"tensor_parallel": {"tp_size": True}}, "tensor_parallel.tp_size"),
    ],
)
def test_errors_name_the_key(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        make_config(given)
    assert said in str(error.value)


def test_config_and_keywords_are_one(tmp_path: Path) -> None:
    file = tmp_path / "inference.json"
    file.write_text(json.dumps({"dtype": "bf16", "tp": {"tp_size": 2}}))
    both = make_config(str(file), dtype="bf16", max_tokens=7)
    assert (both.dtype, both.tp_size, both.max_out_tokens) == ("bf16", 2, 7)
    assert make_config(both, min_tokens=2) == make_config(
        str(file), max_out_tokens=7, min_out_tokens=2
    )
    with pytest.raises(ValueError, match="dtype is 'bf16' in one place and 'fp32'"):
        make_config(str(file), dtype="fp32")
    with pytest.raises(ValueError, match="tensor_parallel"):
        init_inference(
            torch.nn.Linear(1, 1), {"tp": {"tp_size": 2}}, tensor_parallel={"tp_size": 4}
        )


def test_old_keys_and_keys_without_effect_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    reset()
    given = {
        "mp_size": 1,
        "replace_method": "none",
        "return_tuple": False,
        "quant": {"activation": {"num_bits": 8}},
    }
    with caplog.at_level(logging.WARNING, "ds_inference"):
        make_config(given)
        make_config(given)
    assert len(caplog.records) == 1
    for said in (
        "mp_size: is deprecated and was read as 'tensor_parallel.tp_size'",
        "replace_method: has no effect",
        "return_tuple: has no effect",
        "quant.activation: has no effect",
        "quant: has no effect: dtype is fp16",
    ):
        assert said in caplog.text


@pytest.mark.parametrize(
    ("quant", "key"),
    [
        ({"enabled": False}, "quant.enabled"),
        ({"weight": {"enabled": False}}, "quant.weight.enabled"),
    ],
)
def test_int8_that_is_switched_off_is_said(
    quant: dict[str, Any], key: str, caplog: pytest.LogCaptureFixture
) -> None:
    reset()
    with caplog.at_level(logging.WARNING, "ds_inference"):
        make_config({"dtype": "int8", "quant": quant})
    assert (
        f"dtype: int8 quantises nothing, because {key} is false; weights are bfloat16"
        in caplog.text
    )


@pytest.mark.parametrize(
    "weight", [{"post_init_quant": {"mlp": {}}}, {"quantized_initialization": {"num_bits": 4}}]
)
def test_layers_named_in_quant_are_quantised_whatever_dtype_says(
    weight: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    reset()
    with caplog.at_level(logging.WARNING, "ds_inference"):
        assert make_config(dtype="bf16", quant={"weight": weight}).quant.weight.layers(0)
    assert not caplog.records


@pytest.mark.parametrize("quant", [8, (True, 8), [False, 8]])
def test_quant_as_groups_is_read(quant: Any, caplog: pytest.LogCaptureFixture) -> None:
    reset()
    with caplog.at_level(logging.WARNING, "ds_inference"):
        made = make_config({"dtype": "int8", "quant": quant})
    assert made.quant.weight.q_groups == 8 and made.bits == 8
    assert "quant: has no effect as groups" in caplog.text
    with pytest.raises(ConfigError, match="quant"):
        make_config({"dtype": "int8", "quant": ("yes", 8)})


def test_is_a_section_that_tools_check() -> None:
    from ds_core.config import load_config

    _, run = load_config({"train_batch_size": 1, "inference": {"kernel_inject": True}})
    section = run.section("inference")
    assert isinstance(section, DeepSpeedInferenceConfig)
    assert section.replace_with_kernel_inject
