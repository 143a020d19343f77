"""Ranks meet by the rendezvous of somebody else's, installed beside ds-rendezvous; see file_rendezvous.py."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from ds_testing import RendezvousConformance
from ds_testing.processes import clean_environment

HERE = Path(__file__).parent
METADATA = "Metadata-Version: 2.1\nName: acme-rendezvous\nVersion: 0.1\n"
CODE = """
import torch, ds_core
from ds_core import comm
ds_core.init_distributed("gloo")
x = torch.tensor([comm.rank() + 1.0])
comm.all_reduce(x)
print(comm.rank(), comm.world_size(), x.item())
"""


def test_an_installed_rendezvous_serves(tmp_path: Path) -> None:
    shutil.copy(HERE / "file_rendezvous.py", tmp_path)
    info = tmp_path / "acme_rendezvous-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(METADATA)
    (info / "entry_points.txt").write_text("[ds_core.backends]\nacme = file_rendezvous\n")
    job = {"ACME_RANKS": "2", "ACME_FILE": str(tmp_path / "store"), "PYTHONPATH": str(tmp_path)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", CODE],
            env=clean_environment(**job, ACME_RANK=str(rank)),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=300)[0] for rank in ranks]
    assert [text.splitlines()[-1:] for text in said] == [["0 2 3.0"], ["1 2 3.0"]], said


class TestFileRendezvous(RendezvousConformance):
    plugin = "file_rendezvous"
    alone = {"HOME": "/root"}

    @pytest.fixture(autouse=True)
    def _importable(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.syspath_prepend(str(HERE))
        monkeypatch.setenv("ACME_FILE", str(tmp_path / "store"))

    def environment(self, rank: int, size: int) -> dict[str, str]:
        return {"ACME_RANK": str(rank), "ACME_RANKS": str(size)}
