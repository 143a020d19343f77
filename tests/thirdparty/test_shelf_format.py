"""A checkpoint format of somebody else's; see shelf_format.py."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import ClassVar

import pytest
from building import write_metadata
from ds_checkpoint.formats.conformance import CheckpointFormatConformance
from ds_testing.processes import clean_environment, run

HERE = Path(__file__).parent
WANTED = ["('a shelf holds weights alone',)", "True", "again/shelf"]


class TestShelf(CheckpointFormatConformance):
    plugin = "shelf_format"
    name = "shelf"
    optimizer: ClassVar[bool] = False

    @pytest.fixture(autouse=True)
    def _importable(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.syspath_prepend(str(HERE))


def test_installed_it_is_converted_and_loaded(tmp_path: Path) -> None:
    shutil.copy(HERE / "shelf_format.py", tmp_path)
    write_metadata(
        tmp_path, "acme-shelf", entry_points={"ds_core.backends": {"acme_shelf": "shelf_format"}}
    )
    code = """
import ds_core, torch
from torch import nn
from ds_checkpoint.formats.convert import convert
def make(seed):
    torch.manual_seed(seed)
    return ds_core.initialize(model=nn.Linear(2, 1), config={"train_batch_size": 1})[0]
one = make(0)
one.save_checkpoint("ours")
print(convert("ours", "shelf", "shelf").missing)
two = make(1)
two.load_checkpoint("shelf")
print(torch.equal(one.module.weight, two.module.weight))
print(convert("shelf", "again").path)
"""
    said = run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=clean_environment(PYTHONPATH=str(tmp_path)),
    )
    assert said.count("(shelf): a shelf holds weights alone") == 1  # the engine's, in the log
    words = [line for line in said.splitlines() if line in WANTED]
    assert words == WANTED, said
