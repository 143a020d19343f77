"""The declaration of dscore-compression, its section, and what is wrong with one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from ds_compression import init_compression
from ds_testing import PluginConformance, TransformConformance

from ds_core.errors import ConfigError, UsageError
from ds_core.setup.compose import compose

sys.path.insert(0, str(Path(__file__).parent))
from compressed_runs import config, net  # noqa: E402

GROUP = {"params": {"dense_ratio": 0.5}, "modules": ["0"]}
ROWS = {
    "row_pruning": {
        "shared_parameters": {"enabled": True, "schedule_offset": 0},
        "different_groups": {"r": GROUP},
    }
}


def on(technique: str, group: Any = None, **shared: Any) -> dict[str, Any]:
    groups = {} if group is None else {"g": group}
    return {
        technique: {"shared_parameters": {"enabled": True, **shared}, "different_groups": groups}
    }


BAD: dict[str, dict[str, Any]] = {
    "target_bits 9 is more than "
    "start_bits 8": on("weight_quantization", {"params": {"target_bits": 9}}),
    "2 bits are symmetric": on("weight_quantization", {"params": {"target_bits": 2}}, quantization_type="asymmetric"),
    "different_groups is empty": on("row_pruning"),
    "num_heads is missing": on("head_pruning", {}),
    "is no regular expression": on("row_pruning", {"modules": ["(up"]}),
    "related_modules has 1 lists, and modules 2": on(
        "row_pruning", {"modules": ["a", "b"], "related_modules": [["c"]]}
    ),
    "is no block pattern": on("sparse_pruning", {}, method="snip_momentum", block_pattern="4:2"),
    "comes before "
    "schedule_offset": on("sparse_pruning", {}, schedule_offset=5, schedule_offset_end=4),
    "teacher_layer belong "
    "together": {"layer_reduction": {"enabled": True, "module_name_prefix": "layer"}},
    "teacher_layer has 2 entries": {
        "layer_reduction": {
            "enabled": True, "module_name_prefix": "l", "teacher_layer": [0, 1], "keep_number_layer": 3,
        }
    },
    "nothing is copied": {"layer_reduction": {"enabled": True}},
}  # fmt: skip


class TestDeclaration(PluginConformance):
    entry_point = "ds_compression.plugin"
    section = "compression_training"
    good_config: ClassVar[Any] = ROWS
    bad_configs: ClassVar[Any] = [
        *BAD.values(),
        {"row_prunning": {}},
        on("activation_quantization", {"params": {"bits": 3}}),
    ]


class TestTransform(TransformConformance):
    plugin = "ds_compression.plugin"
    config: ClassVar[Any] = {"compression_training": ROWS}
    same_outputs = False
    given_back = False  # masks are what was trained; `redundancy_clean` ends compression


@pytest.mark.parametrize("what", BAD)
def test_what_is_wrong_is_said(what: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose(config(BAD[what]))
    assert what in str(caught.value)


@pytest.mark.parametrize(
    "section, key, words",
    [
        (on("row_pruning", {"modules": ["nothing"]}), "modules[0]", "matches no linear layer"),
        (on("channel_pruning", {}), "modules[0]", "matches no conv layer"),
        (
            on("weight_quantization", {}, quantize_groups=7),
            "quantize_groups",
            "do not divide the 128 weights of up",
        ),
        (
            on("head_pruning", {"modules": ["up"]}, num_heads=3),
            "num_heads",
            "do not divide the 8 inputs of up",
        ),
        (
            on("sparse_pruning", None, method="snip_momentum", block_pattern="3x1"),
            "block_pattern",
            "up, down, head",
        ),
    ],
)
def test_what_does_not_fit_the_model_is_said(section: dict[str, Any], key: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        init_compression(net(), config(section))
    assert key in caught.value.problems[0].path
    assert words in str(caught.value)


def test_one_layer_in_two_groups() -> None:
    section = on("row_pruning", {"modules": ["up"]})
    section["row_pruning"]["different_groups"]["other"] = {"modules": ["up|down"]}
    with pytest.raises(ConfigError, match="up is in group 'g' already"):
        init_compression(net(), config(section))


def test_excluded_modules() -> None:
    section = on(
        "sparse_pruning",
        None,
        method="snip_momentum",
        block_pattern="3x1",
        excluded_modules="up|down|head",
    )
    model = init_compression(net(), config(section))
    assert not list(model.buffers())


def test_keys_without_effect_are_named() -> None:
    section = on("sparse_pruning", {}, block_pattern="2x2") | on(
        "weight_quantization", {}, quantizer_kernel=True
    )
    notes = {note.path: str(note) for note in compose(config(section)).notes}
    assert (
        "snip_momentum"
        in notes["compression_training.sparse_pruning.shared_parameters.block_pattern"]
    )
    assert "compression_training.weight_quantization.shared_parameters.quantizer_kernel" in notes
    section = on(
        "sparse_pruning", None, method="snip_momentum", block_pattern="2:4", dense_ratio=0.5
    )
    assert "says how much" in str(compose(config(section)).notes[0])


def test_usage(clean_ds: None) -> None:
    import ds_core

    section = {
        "row_pruning": {**on("row_pruning", {"modules": ["up"]}, method="topk")["row_pruning"]}
    }
    with pytest.raises(UsageError, match="takes no mpu"):
        init_compression(net(), config(section), mpu=object())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no section compression_training"):
        init_compression(net(), {"train_batch_size": 8})
    model = init_compression(net(), config(section))
    with pytest.raises(UsageError, match="compressed already"):
        init_compression(model, config(section))
    with pytest.raises(ConfigError, match="not what init_compression was given"):
        ds_core.initialize(model=model, config=config(on("row_pruning", {"modules": ["down"]})))


def test_scores_that_nobody_trains(clean_ds: None) -> None:
    import ds_core

    model = net(dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = config(on("row_pruning", {"modules": ["up"]}, method="topk"))
    del settings["optimizer"]
    engine, *_ = ds_core.initialize(model=model, optimizer=optimizer, config=settings)
    engine.backward(engine(torch.randn(8, 8)).square().mean())
    with pytest.raises(Exception, match="the optimizer has not got up.row_mask_scores"):
        engine.step()
    engine.destroy()
