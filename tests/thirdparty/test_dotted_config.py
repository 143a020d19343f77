"""Config files in a format of somebody else's; see dotted_config.py."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import ClassVar

import pytest
from building import write_metadata
from ds_testing import ConfigFormatConformance
from ds_testing.processes import clean_environment, run

HERE = Path(__file__).parent
CONFIG = """
# 4 rows per step
train_batch_size = 4
optimizer.type = "AdamW"
optimizer.params = {"lr": 0.1}
fp16.enabled = false
"""


class TestDotted(ConfigFormatConformance):
    plugin = "dotted_config"
    samples: ClassVar = {
        ".dotted": (
            'a.b = [1, "x"]\n# c\na.c.d = null\n e = {"f": 1.5}',
            {"a": {"b": [1, "x"], "c": {"d": None}}, "e": {"f": 1.5}},
        )
    }
    broken: ClassVar = {".dotted": "a.b = x"}
    repeated: ClassVar = {".dotted": "a = 1\na.b = 2"}

    @pytest.fixture(autouse=True)
    def _importable(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.syspath_prepend(str(HERE))


def test_installed_it_reads_config_files_and_its_errors_name_the_key(tmp_path: Path) -> None:
    assert len((HERE / "dotted_config.py").read_text().splitlines()) <= 60
    shutil.copy(HERE / "dotted_config.py", tmp_path)
    write_metadata(
        tmp_path, "acme-dotted", entry_points={"ds_core.backends": {"acme_dotted": "dotted_config"}}
    )
    code = """
import ds_core, sys
from torch import nn
from ds_core.errors import ConfigError
for file in sys.argv[1:]:
    try:
        engine, *_ = ds_core.initialize(model=nn.Linear(2, 1), config=file)
        print(engine.train_batch_size(), engine.optimizer.param_groups[0]["lr"])
    except ConfigError as error:
        print(error)
"""
    texts = {
        "good": CONFIG,
        "twice": CONFIG + "fp16.enabled = true\n",
        "bad": CONFIG + "fp16.loss_scale = 1.\n",
    }
    for name, text in texts.items():
        (tmp_path / f"{name}.dotted").write_text(text)
    files = [str(tmp_path / f"{name}.dotted") for name in texts]
    said = run(
        [sys.executable, "-c", code, *files], env=clean_environment(PYTHONPATH=str(tmp_path))
    )
    good, twice, bad = said.splitlines()
    assert good == "4 0.1"
    assert "twice.dotted: fp16.enabled: the key 'enabled' is repeated" in twice
    assert "fp16.loss_scale" in bad
    assert "line 7" in bad
