"""Ranks meet by the rendezvous of somebody else's, installed beside dscore-rendezvous; see
file_rendezvous.py.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from building import write_metadata
from ds_testing import RendezvousConformance
from ds_testing.kits.tools.rendezvous import start_rank
from ds_testing.processes import output

HERE = Path(__file__).parent


def test_an_installed_rendezvous_serves(tmp_path: Path) -> None:
    shutil.copy(HERE / "file_rendezvous.py", tmp_path)
    write_metadata(
        tmp_path, "acme-rendezvous", entry_points={"ds_core.backends": {"acme": "file_rendezvous"}}
    )
    job = {"ACME_RANKS": "2", "ACME_FILE": str(tmp_path / "store"), "PYTHONPATH": str(tmp_path)}
    ranks = [start_rank({**job, "ACME_RANK": str(rank)}, dist_backend="gloo") for rank in range(2)]
    assert [output(rank) for rank in ranks] == ["0 2 0 3.0", "1 2 1 3.0"]


class TestFileRendezvous(RendezvousConformance):
    plugin = "file_rendezvous"
    alone = {"HOME": "/root"}

    @pytest.fixture(autouse=True)
    def _importable(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.syspath_prepend(str(HERE))
        monkeypatch.setenv("ACME_FILE", str(tmp_path / "store"))

    def environment(self, rank: int, size: int) -> dict[str, str]:
        return {"ACME_RANK": str(rank), "ACME_RANKS": str(size)}
