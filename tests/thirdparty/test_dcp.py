"""A checkpointer on torch.distributed.checkpoint, by the public contract alone."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

HERE = Path(__file__).parent / "dcp"
sys.path.insert(0, str(HERE))  # as an installed distribution would be found

from ds_testing import CheckpointerConformance  # noqa: E402


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
class TestDcp(CheckpointerConformance):
    config: ClassVar[Any] = {"dcp": {}}
    load = ("dcp=dcp_plugin",)
    variants: ClassVar[Any] = {
        "stage 1": {"zero_optimization": {"stage": 1}},
        "stage 2": {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}},
        "stage 3": {"zero_optimization": {"stage": 3}, "fp16": {"enabled": True}},
    }


def test_it_is_small() -> None:
    lines = (HERE / "dcp_checkpointer.py").read_text().splitlines()
    assert sum(bool(line.strip()) for line in lines) <= 60


def test_nothing_in_its_files_is_pickled(tmp_path: Path, ranks: Any) -> None:
    ranks(2, save, str(tmp_path))
    names = {path.name for path in tmp_path.rglob("*") if path.is_file()} - {"latest"}
    assert names and {Path(name).suffix for name in names} == {".json", ".safetensors"}


def save(folder: str) -> None:
    import ds_core

    config = {"train_batch_size": 2, "dcp": {}, "plugins": {"load": ["dcp=dcp_plugin"]}}
    engine, *_ = ds_core.initialize(model=torch.nn.Linear(3, 2), config=config)
    engine.save_checkpoint(folder)
    engine.destroy()
