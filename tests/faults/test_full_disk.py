"""A disk that fills up in the middle of a save: a clear error, nothing lost, and saving goes on
once there is room.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import json, pathlib, shutil, sys
import torch, ds_core
from ds_core.errors import CheckpointError
folder, background = pathlib.Path(sys.argv[1]), sys.argv[2] == "background"

def make():
    config = {"train_batch_size": 1, "optimizer": {"type": "AdamW"}, "checkpoint": {"async": background}}
    engine, *_ = ds_core.initialize(model=torch.nn.Linear(400, 400, bias=False), config=config)
    engine.backward(engine(torch.ones(1, 400)).sum())
    engine.step()
    return engine

def save(engine, tag):
    with torch.no_grad():
        engine.module.weight.fill_(float(tag))
    engine.save_checkpoint(folder, tag)
    engine.wait_for_checkpoint()

engine, told, good = make(), None, 0
try:
    for tag in range(1, 9):
        save(engine, str(tag))
        good = tag
except CheckpointError as error:
    told = str(error)
names = sorted(p.name for p in folder.iterdir())
fresh = make()
path, _ = fresh.load_checkpoint(folder)
loaded = sorted(set(fresh.module.weight.flatten().tolist()))
shutil.rmtree(folder / "1")
save(engine, "9")
again = make()
again.load_checkpoint(folder)
after = sorted(set(again.module.weight.flatten().tolist()))
print(json.dumps({"told": told, "good": good, "names": names, "loaded": loaded, "after": after}))
"""


def small_disk(folder: Path) -> list[str]:
    """What runs a command with a file system of 8 MB at `folder`, which goes away with the
    command."""
    inside = 'mount -t tmpfs -o size=8m tmpfs "$0" && exec "$@"'
    flags = ["-m"] if os.geteuid() == 0 else ["-U", "-r", "-m"]
    return ["unshare", *flags, "sh", "-c", inside, str(folder)]


@pytest.mark.slow
@pytest.mark.parametrize("how", [pytest.param("foreground", marks=pytest.mark.slow), "background"])
def test_a_full_disk(tmp_path: Path, how: str) -> None:
    disk = small_disk(tmp_path)
    if (
        shutil.which("unshare") is None
        or subprocess.run([*disk, "true"], capture_output=True, check=False).returncode
    ):
        pytest.skip("this system lets nobody mount a small tmpfs")
    done = subprocess.run(
        [*disk, sys.executable, "-c", SCRIPT, str(tmp_path), how],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert "No space left on device" in told["told"]
    assert told["good"] >= 2
    assert told["names"] == [".lock", *map(str, range(1, told["good"] + 1)), "latest"], "no debris"
    assert told["loaded"] == [told["good"]]
    assert told["after"] == [9.0]
