"""Names that do not fit the model are refused: presets of other families, layers that the model
does not have.
"""

from __future__ import annotations

from typing import Any

import pytest
from ds_tensor_parallel.config import TensorParallelConfig
from ds_tensor_parallel.planning.plan import Plan, make_plan
from ds_testing.pytest_plugin import Ranks
from torch import nn

import ds_core
from ds_core.errors import ConfigError


def plan(kind: str, **section: Any) -> Plan:
    hf = pytest.importorskip("transformers")
    small = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 36, "num_hidden_layers": 2}
    small |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
    config = hf.AutoConfig.for_model(kind, **small)
    model: nn.Module = hf.AutoModelForCausalLM.from_config(config)
    return make_plan(
        model, TensorParallelConfig.model_validate({"autotp_size": 2, **section}), 2, "config"
    )


@pytest.mark.parametrize(
    ("kind", "preset", "fit"),
    [
        ("llama", "deepseek_v2", "use llama or mixtral or qwen2"),  # queries divided, keys whole
        ("llama", "gpt2", "use llama or mixtral or qwen2"),
        ("phi3", "llama", "use phi3"),
        ("qwen3", "deepseek_v2", "use llama or mixtral or qwen2"),  # which only its tp_plan knows
    ],
)
def test_a_preset_of_another_family_is_refused(kind: str, preset: str, fit: str) -> None:
    with pytest.raises(
        ConfigError, match=f"preset_model.*{preset}.*another family.*{kind}.*\n?.*{fit}"
    ):
        plan(kind, preset_model=preset)


@pytest.mark.parametrize(
    ("kind", "preset"), [("llama", "llama"), ("llama", "qwen2"), ("qwen3", "llama")]
)
def test_a_preset_of_a_family_alike_is_taken(kind: str, preset: str) -> None:
    assert plan(kind, preset_model=preset).source == f"preset {preset}"


def names_are_missing() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 4)))
    section = {"autotp_size": 2, "injection_policy_tuple": ["0.2", "attention.o"]}
    config = {"train_micro_batch_size_per_gpu": 1, "tensor_parallel": section}
    with pytest.raises(
        ConfigError, match=r"injection_policy_tuple.*'attention.o'.*no linear layer"
    ):
        ds_core.initialize(model=model, config=config)


def test_names_of_no_layer_are_refused(ranks: Ranks) -> None:
    ranks(2, names_are_missing)
