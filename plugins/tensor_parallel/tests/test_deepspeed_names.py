"""`tp_model_init` and `set_autotp_mode`: a model asks for the section, which `initialize` merges
with the config.

Rules as objects (`AutoTPConfig`) are the same as the dict ``partition_config``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ds_tensor_parallel.deepspeed_names import set_autotp_mode, tp_model_init
from ds_tensor_parallel.planning.autotp_config import (
    AutoTPConfig,
    AutoTPPresets,
    PartitionType,
    TPLayerSpec,
    merge_autotp_configs,
)
from ds_tensor_parallel.planning.plan import make_plan
from ds_testing import run_ranks
from torch import nn

from ds_core.errors import ConfigError, UsageError
from ds_core.setup.compose import compose

sys.path.insert(0, str(Path(__file__).parent))

from ds_testing.truth import train
from tp_models import hugging_face, settings, texts


def asked(*args: Any, config: Any = None, **sections: Any) -> Any:
    """What `initialize` reads for a model that asked with `args`."""
    model = tp_model_init(nn.Linear(2, 2), *args, config)
    return compose({"train_micro_batch_size_per_gpu": 1, **sections}, model).config


def legacy(called: bool) -> tuple[list[float], int]:
    """Losses, and the columns of a layer that this rank has; with the calls and no section, or with
    the section.
    """
    import ds_core

    model = hugging_face("llama")
    config = settings(2)
    if called:
        del config["tensor_parallel"]
        set_autotp_mode(training=True)
        model = tp_model_init(model, 2, None)
    engine, *_ = ds_core.initialize(model=model, config=config)
    losses = train(engine, texts, 2)
    rows = engine.module.model.layers[0].self_attn.q_proj.weight.shape[0]
    engine.destroy()
    return losses, rows


def test_a_recorded_size_divides_as_the_section_does() -> None:
    called = run_ranks(2, legacy, True)
    section = run_ranks(2, legacy, False)
    assert called == section and called[0][1] == 16


def test_settings_merge() -> None:
    rules = {"partition_config": {"strict_mode": True}}
    config = asked(
        4,
        torch.bfloat16,
        config=rules,
        tensor_parallel={"autotp_size": 4, "tp": {"tp_grain_size": 8}},
    )
    section = config.section("tensor_parallel")
    assert (section.size, section.tensor_parallel.tp_grain_size, section.rules.strict_mode) == (
        4,
        8,
        True,
    )
    assert config.core.bf16.enabled and not config.core.fp16.enabled
    assert asked(2, torch.float16, tensor_parallel={"tp": {"tp_size": 2}}).core.fp16.enabled
    assert asked(1, None, bf16={"enabled": True}).core.bf16.enabled
    assert tp_model_init(nn.Linear(2, 2), 2, torch.bfloat16).weight.dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("args", "sections", "words"),
    [
        (
            (2, None),
            {"tensor_parallel": {"autotp_size": 4}},
            "tensor_parallel.autotp_size.*is 4.*was built for 2",
        ),
        (
            (2, None),
            {"tensor_parallel": {"tp": {"tp_size": 4}}},
            "autotp_size is 2, and tensor_parallel.tp_size 4",
        ),
        ((2, None), {"tensor_parallel": {"enabled": False}}, "tensor_parallel.enabled.*is False"),
        ((2, torch.float16), {"bf16": {"enabled": True}}, "bf16.enabled.*is True"),
        ((2, torch.float32), {"fp16": {"enabled": True}}, "fp16.enabled.*is True"),
    ],
)
def test_conflicts_raise(args: Any, sections: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        asked(*args, **sections)


def test_bad_calls() -> None:
    model = tp_model_init(nn.Linear(2, 2), 2, None)
    assert tp_model_init(model, 2, None) is model
    calls: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
        ((model, 4, None), {}, "autotp_size would be 4, and was recorded as 2"),
        ((nn.Linear(2, 2), 0, None), {}, "tp_size is 0"),
        ((nn.Linear(2, 2), 2, torch.float64), {}, "dtype is torch.float64"),
        ((nn.Linear(2, 2), 2, None, {"autotp_size": 3}), {}, "and autotp_size in its config 3"),
        ((nn.Linear(2, 2), 2, None), {"tp_group": 3}, "leave tp_group out"),
    ]
    for args, keywords, words in calls:
        with pytest.raises(UsageError, match=words):
            tp_model_init(*args, **keywords)
    with pytest.raises(UsageError, match="inference"):
        set_autotp_mode(training=False)


def llama_like() -> nn.Module:
    """Names of a Llama, with queries, keys and values in one weight."""
    attention = nn.ModuleDict(
        {"qkv_proj": nn.Linear(8, 16, bias=False), "o_proj": nn.Linear(8, 8, bias=False)}
    )
    sizes = {"gate_proj": (8, 12), "up_proj": (8, 12), "down_proj": (12, 8)}
    mlp = nn.ModuleDict({name: nn.Linear(*size, bias=False) for name, size in sizes.items()})
    return nn.Sequential(nn.ModuleDict({"self_attn": attention, "mlp": mlp}), nn.Linear(8, 7))


FUSED: list[dict[str, Any]] = [
    {"patterns": [r".*\.qkv_proj\.weight$"], "shape": [[8, 4, 4], -1], "partition_dim": 0},
    {"patterns": [r".*\.(o|down)_proj\.weight$"], "partition_type": "row"},
    {"patterns": [r".*\.(gate|up)_proj\.weight$"]},
    {"patterns": ["1"], "partition_type": "skip", "model_types": ["other"]},
]


def planned(section: Any) -> Any:
    config = compose({"train_micro_batch_size_per_gpu": 1, "tensor_parallel": section}).config
    return make_plan(llama_like(), config.section("tensor_parallel"), 2, "ds.json")


def test_rules_as_objects_give_the_plan_of_the_dict() -> None:
    wanted = planned(
        {"autotp_size": 2, "partition_config": {"use_default_specs": False, "layer_specs": FUSED}}
    )
    assert {n: (r.kind.value, r.segments) for n, r in wanted.rules.items()} == {
        "0.self_attn.qkv_proj": ("column", (8, 4, 4)),
        **{f"0.mlp.{name}_proj": ("column", 1) for name in ("gate", "up")},
        **dict.fromkeys(("0.self_attn.o_proj", "0.mlp.down_proj"), ("row", 1)),
    }
    rules = AutoTPConfig(
        tp_size=2,
        use_default_specs=False,
        layer_specs=[
            TPLayerSpec([r".*\.qkv_proj\.weight$"], shape=((8, 4, 4), -1), partition_dim=0),
            TPLayerSpec([r".*\.(o|down)_proj\.weight$"], PartitionType.ROW),
            TPLayerSpec([r".*\.(gate|up)_proj\.weight$"]),
            TPLayerSpec(["1"], PartitionType.SKIP, model_types=["other"]),
        ],
    )
    assert planned({"autotp_size": 2, "partition_config": rules}) == wanted
    assert (
        AutoTPConfig.from_dict({"tp_size": 2, "use_default_specs": False, "layer_specs": FUSED})
        == rules
    )
    assert asked(2, None, config=rules) == asked(2, None, config={"partition_config": dict(rules)})
    assert (
        asked(2, None, config=rules).section("tensor_parallel").rules.layer_specs[1].partition_type
        == "row"
    )
    with pytest.raises(
        ConfigError, match=r"partition_config.tp_size is 2, and the size 4; give autotp_size"
    ):
        asked(4, None, config=rules)
    assert rules.find_matching_spec("0.mlp.up_proj.weight") is rules.layer_specs[2]
    assert rules.find_matching_spec("1.weight") is None and rules.layer_specs[3].matches(
        "1.weight", "Other"
    )


def test_presets_as_objects() -> None:
    llama = AutoTPPresets.get_preset("LLaMA")
    bloom = AutoTPPresets.bloom()
    assert (
        llama == AutoTPPresets.llama()
        and llama is not None
        and AutoTPPresets.get_preset("gpt9") is None
    )
    assert [spec.partition_type.value for spec in bloom.layer_specs] == [
        "column",
        "row",
        "column",
        "row",
    ]
    own = AutoTPConfig(
        layer_specs=[
            TPLayerSpec([r".*qkv_proj"], shape=((8, 4, 4), -1)),
            # it takes all that the preset's own rule is for
            TPLayerSpec([r".*down_proj"], PartitionType.SKIP),
            TPLayerSpec([r".*(gate|up)_proj"], PartitionType.SKIP),
        ],
        use_default_specs=False,
    )
    llama.layer_specs = [spec for spec in llama.layer_specs if "[qkv]" not in spec.patterns[0]]
    merged = merge_autotp_configs(llama, own)
    assert (
        merged.layer_specs == own.layer_specs + llama.layer_specs and not merged.use_default_specs
    )
    kinds = {
        n: r.kind.value
        for n, r in planned({"autotp_size": 2, "partition_config": merged}).rules.items()
    }
    mlp = dict.fromkeys((f"0.mlp.{name}_proj" for name in ("gate", "up", "down")), "whole")
    assert kinds == {"0.self_attn.qkv_proj": "column", "0.self_attn.o_proj": "row", **mlp}
    for name in ("chatglm", "deepseek_v2", "mixtral", "phi3"):
        with pytest.raises(UsageError, match=f"set tensor_parallel.preset_model to '{name}'"):
            AutoTPPresets.get_preset(name)
