"""`tp_model_init` and `set_autotp_mode`: a model asks for the section, which `initialize` merges with the config."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ds_tensor_parallel.deepspeed_names import set_autotp_mode, tp_model_init
from ds_testing import run_ranks
from torch import nn

from ds_core.compose import compose
from ds_core.errors import ConfigError, UsageError

sys.path.insert(0, str(Path(__file__).parent))

from tp_models import hugging_face, settings, train


def asked(*args: Any, config: Any = None, **sections: Any) -> Any:
    """What `initialize` reads for a model that asked with `args`."""
    model = tp_model_init(nn.Linear(2, 2), *args, config)
    return compose({"train_micro_batch_size_per_gpu": 1, **sections}, model).config


def legacy(called: bool) -> tuple[list[float], int]:
    """Losses, and the columns of a layer that this rank has; with the calls and no section, or with the section."""
    import ds_core

    model, config = hugging_face("llama"), settings(2)
    if called:
        del config["tensor_parallel"]
        set_autotp_mode(training=True)
        model = tp_model_init(model, 2, None)
    engine, *_ = ds_core.initialize(model=model, config=config)
    losses = train(engine, 2)
    rows = engine.module.model.layers[0].self_attn.q_proj.weight.shape[0]
    engine.destroy()
    return losses, rows


def test_a_recorded_size_divides_as_the_section_does() -> None:
    called, section = run_ranks(2, legacy, True), run_ranks(2, legacy, False)
    assert called == section and called[0][1] == 16


def test_settings_merge() -> None:
    rules = {"partition_config": {"strict_mode": True}}
    config = asked(4, torch.bfloat16, config=rules, tensor_parallel={"autotp_size": 4, "tp": {"tp_grain_size": 8}})
    section = config.section("tensor_parallel")
    assert (section.size, section.tensor_parallel.tp_grain_size, section.rules.strict_mode) == (4, 8, True)
    assert config.core.bf16.enabled and not config.core.fp16.enabled
    assert asked(2, torch.float16, tensor_parallel={"tp": {"tp_size": 2}}).core.fp16.enabled
    assert asked(1, None, bf16={"enabled": True}).core.bf16.enabled
    assert tp_model_init(nn.Linear(2, 2), 2, torch.bfloat16).weight.dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("args", "sections", "words"),
    [
        ((2, None), {"tensor_parallel": {"autotp_size": 4}}, "tensor_parallel.autotp_size.*is 4.*was built for 2"),
        ((2, None), {"tensor_parallel": {"tp": {"tp_size": 4}}}, "autotp_size is 2, and tensor_parallel.tp_size 4"),
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
