"""A checkpointer on torch.distributed.checkpoint, by the public contract alone: the template of
that kind.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from ds_new.naming import forms_of
from ds_new.rendering import render
from ds_testing import CheckpointerConformance


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where its package lies."""
    made = tmp_path_factory.mktemp("dcp")
    for path, text in render("checkpointer", forms_of("dcp-states")).items():
        (made / path).parent.mkdir(parents=True, exist_ok=True)
        (made / path).write_text(text)
    return made


@pytest.fixture(autouse=True)
def _as_installed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(folder))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
class TestDcp(CheckpointerConformance):
    config: ClassVar[Any] = {"dcp_states": {}}
    load = ("dcp_states=dcp_states.plugin",)
    variants: ClassVar[Any] = {
        "stage 1": {"zero_optimization": {"stage": 1}},
        "stage 2": {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}},
        "stage 3": {"zero_optimization": {"stage": 3}, "fp16": {"enabled": True}},
    }


def test_nothing_in_its_files_is_pickled(tmp_path: Path, ranks: Any) -> None:
    ranks(2, save, str(tmp_path))
    names = {path.name for path in tmp_path.rglob("*") if path.is_file()} - {"latest"}
    assert names and {Path(name).suffix for name in names} == {".json", ".safetensors"}


def save(folder: str) -> None:
    import ds_core

    config = {
        "train_batch_size": 2,
        "dcp_states": {},
        "plugins": {"load": ["dcp_states=dcp_states.plugin"]},
    }
    engine, *_ = ds_core.initialize(model=torch.nn.Linear(3, 2), config=config)
    engine.save_checkpoint(folder)
    engine.destroy()
