"""A storage of somebody else's: the engine, the kit and the commands see checkpoints in it; see
shelf.py beside this file.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import pytest
import torch
from ds_checkpoint.storages.conformance import StorageConformance
from ds_checkpoint.storages.contract import Storage
from ds_testing import PluginConformance
from shelf_storage import SHELVES, open_shelf

import ds_core


class TestShelf(StorageConformance):
    def make_storage(self, tmp_path: Path, below: str = "") -> Storage:
        url = f"shelf://{tmp_path.name}"
        return open_shelf(f"{url}/{below}" if below else url, None)


class TestDeclaration(PluginConformance):
    entry_point = "shelf"


def make(**config: Any) -> Any:
    engine, *_ = ds_core.initialize(
        model=torch.nn.Linear(4, 2),
        config={
            "train_batch_size": 1,
            "optimizer": {"type": "AdamW"},
            "plugins": {"load": ["shelf=shelf"]},
            **config,
        },
    )
    return engine


def step(engine: Any) -> None:
    engine.backward(engine(torch.ones(1, 4)).square().sum())
    engine.step()


@pytest.mark.parametrize("later", [False, True])
def test_an_engine_saves_and_resumes(later: bool) -> None:
    url = f"shelf://engine-{later}"
    engine = make(checkpoint={"async": later, "keep_last": 2})
    for _ in range(4):
        step(engine)
        engine.save_checkpoint(url, client_state={"epoch": engine.global_steps})
    engine.wait_for_checkpoint()
    assert sorted(SHELVES[f"engine-{later}"].tags) == ["global_step3", "global_step4"]
    wanted = [p.detach().clone() for p in engine.module.parameters()]
    engine.destroy()
    other = make()
    path, client = other.load_checkpoint(url)
    assert (path, client) == (f"{url}/global_step4", {"epoch": 4})
    assert all(map(torch.equal, other.module.parameters(), wanted))
    other.destroy()
