"""Ranks of a run under ``dscore run`` are killed: it goes on from memory as if nothing had been."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from ds_testing.processes import run

PROGRAM = Path(__file__).with_name("peer_run.py")
STEPS = 12


def lives(folder: Path, settings: dict[str, Any], nproc: int) -> list[dict[str, Any]]:
    """What each rank of the last start has noted."""
    folder.mkdir()
    path = folder / "settings.json"
    path.write_text(json.dumps({"folder": str(folder), "steps": STEPS, "saves": [3]} | settings))
    command = [sys.executable, "-m", "ds_cli", "run", "--nproc", str(nproc), "--max-restarts", "1"]
    run([*command, str(PROGRAM), str(path)], timeout=300)
    attempt = int("kill" in settings)
    return [json.loads((folder / f"end-{attempt}-{r}.json").read_text()) for r in range(nproc)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kill", "lose_memory"), [([1], False), ([2, 3], True), ([0, 1, 2, 3], False)]
)
def test_a_killed_run_goes_on_from_memory(
    tmp_path: Path, kill: list[int], lose_memory: bool
) -> None:
    hosts = [0, 0, 1, 1]
    config = {"zero_optimization": {"stage": 2}}
    whole = lives(tmp_path / "whole", {"hosts": hosts, "config": config}, 4)
    settings = {"hosts": hosts, "config": config, "kill": kill, "kill_at": 7}
    again = lives(tmp_path / "killed", settings | {"lose_memory": lose_memory}, 4)
    for before, after in zip(whole, again, strict=True):
        # At most as many steps are lost as are between two sets.
        assert "dscore-peer" in after["loaded"] and after["step"] == 6
        assert after["client"] == {"saved": 3}
        assert after["losses"] == before["losses"][6:] and after["lr"] == before["lr"]
    # The launcher has ended, and with it what was in memory.
    rooms = [Path(room) for room in again[0]["rooms"]]
    assert rooms
    end = time.monotonic() + 20
    while any(room.exists() for room in rooms) and time.monotonic() < end:
        time.sleep(0.1)
    assert not any(room.exists() for room in rooms)
