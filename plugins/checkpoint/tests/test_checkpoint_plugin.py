"""The declaration and the config section of dscore-checkpoint."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from ds_testing import CheckpointerConformance, PluginConformance

from ds_core.setup.compose import compose


class TestDeclaration(PluginConformance):
    entry_point = "ds_checkpoint.plugin"
    section = "checkpoint"
    good_config: ClassVar[Any] = {"async": True, "keep_last": 2, "tag_validation": "FAIL"}
    bad_configs: ClassVar[Any] = (
        {"keep_last": 0},
        {"tag_validation": "Fial"},
        {"use_node_local_storage": True, "async": True},
        {"load_universal": 1},
        {"writer": {"type": "SLOW"}},
        {"writer": {"io_buffer_double": "yes"}},
        {"parallel_write": True},
        3,
    )


class TestCheckpointer(CheckpointerConformance):
    variants: ClassVar[Any] = {
        "fp16": {"fp16": {"enabled": True}},
        "async": {"checkpoint": {"async": True}},
        "local": {"checkpoint": {"use_node_local_storage": True}},
    }


@pytest.mark.parametrize(
    ("section", "key"),
    [
        ({"load_universal": True}, "checkpoint.load_universal"),
        ({"checkpoint_serialization": False}, "checkpoint.checkpoint_serialization"),
        ({"writer": {"type": "FAST"}}, "checkpoint.writer"),
        ({"parallel_write": {"pipeline_stage": True}}, "checkpoint.parallel_write.pipeline_stage"),
    ],
)
def test_keys_without_effect_are_noted(section: Any, key: str) -> None:
    chosen = compose({"train_batch_size": 1, "checkpoint": section})
    assert [note.path for note in chosen.notes] == [key]
    assert compose({"train_batch_size": 1, "checkpoint": {}}).notes == ()
