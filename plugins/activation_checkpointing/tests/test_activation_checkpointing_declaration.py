"""The declaration of dscore-activation-checkpointing, and its section."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from ds_activation_checkpointing.config import ActivationCheckpointingConfig
from ds_testing import PluginConformance


class TestDeclaration(PluginConformance):
    entry_point = "ds_activation_checkpointing.plugin"
    section = "activation_checkpointing"
    good_config: ClassVar[Any] = {"modules": ["Block"], "policy": "keep_matmuls", "budget": 1000000}
    bad_configs: ClassVar[Any] = [
        {"modules": []},
        {"modules": "Block"},
        {"budget": -1},
        {"contiguous_memory_optimization": True, "number_checkpoints": 4},
        {"contiguous_memory_optimization": True, "partition_activations": True},
    ]


@pytest.mark.parametrize(
    "given, recomputed",
    [
        ({}, None),
        ({"modules": "auto"}, "auto"),
        ({"policy": "all"}, "auto"),
        ({"partition_activations": True, "cpu_checkpointing": False}, None),
        ({"partition_activations": True, "budget": 0}, "auto"),
        ({"cpu_checkpointing": True, "modules": ["A", "b.*"]}, ["A", "b.*"]),
    ],
)
def test_sections_with_deepspeed_keys_alone_recompute_nothing(
    given: dict[str, Any], recomputed: Any
) -> None:
    assert ActivationCheckpointingConfig.model_validate(given).recomputes == recomputed
