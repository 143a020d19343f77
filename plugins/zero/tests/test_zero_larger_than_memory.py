"""A model whose states are four times as large as what the process may allocate trains with its
states on disk.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ds_plan import Offload, PlannedRun
from ds_zero.config import ZeroConfig
from ds_zero.planning.predict import predict

from ds_core.precision import Precision, cast_module
from plugins.zero.tests.train_large import LIMIT, WIDTH, config, gpt_of

LAYERS = 32


def trained(folder: Path, width: int, layers: int, *, limited: bool) -> dict[str, Any]:
    """What a process of its own prints."""
    words = [
        sys.executable,
        "-m",
        "plugins.zero.tests.train_large",
        width,
        layers,
        int(limited),
        folder,
    ]
    done = subprocess.run(
        list(map(str, words)), capture_output=True, text=True, cwd=Path(__file__).parents[3]
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
def test_a_model_larger_than_memory_trains(tmp_path: Path) -> None:
    """To the same losses as without a limit, and with the memory that is planned beside that of any
    process.
    """
    with torch.device("meta"):
        model = gpt_of(WIDTH, LAYERS)
    precision = Precision(param=torch.bfloat16, master=torch.float32)
    cast_module(model, precision)
    section = ZeroConfig.model_validate(config("somewhere")["zero_optimization"])
    need = predict(model, section, PlannedRun(1, precision, casts=False), Offload.DISK_ALL)
    states = 16 * sum(p.numel() for p in model.parameters())
    assert states > 6e9 > 3.5 * LIMIT
    limited, free = (trained(tmp_path, WIDTH, LAYERS, limited=on) for on in (True, False))
    assert limited["losses"] == free["losses"]
    # Python, torch and all that does not grow with the model
    small = trained(tmp_path, 64, 2, limited=False)
    planned = small["peak"] + need.device.peak + need.host.peak
    held = limited["peak"]
    assert abs(held - planned) <= 0.1 * planned, (held, planned)
    assert not list(tmp_path.rglob("*.bin"))
