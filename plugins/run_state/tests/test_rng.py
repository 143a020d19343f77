"""Random states: a device generator and numpy's, which the resume tests on the CPU alone cannot
show.
"""

from __future__ import annotations

import json
import logging
import random
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from ds_checkpoint.folder.values import decode, encode
from ds_run_state import rng


def device(kind: str, seed: int) -> Any:
    """Stands in for an accelerator with a generator of its own."""
    generator = torch.Generator().manual_seed(seed)
    return SimpleNamespace(
        device_type=kind,
        generator=generator,
        get_rng_state=generator.get_state,
        set_rng_state=generator.set_state,
    )


def through(state: Any) -> Any:
    tensors: dict[str, torch.Tensor] = {}
    return decode(
        json.loads(json.dumps(encode(state, "x", tensors, own=True))), tensors.__getitem__, "x"
    )


def draw(accelerator: Any) -> list[Any]:
    drawn = [
        torch.rand(2).tolist(),
        random.gauss(0, 1),
        np.random.randn(3).tolist(),
        np.random.permutation(9).tolist(),
    ]
    return [*drawn, torch.rand(2, generator=accelerator.generator).tolist()]


def test_all_generators_come_back() -> None:
    one = device("xpu", 1)
    other = device("xpu", 2)
    draw(one)  # an odd number of gaussians leaves a spare one in the generators
    state = through(rng.capture(one))
    expected = draw(one)
    assert draw(other) != expected
    rng.restore(state, other)
    assert draw(other) == expected


@pytest.mark.parametrize(
    "saved, here, warned", [("cpu", "xpu", True), ("xpu", "cpu", False), ("xpu", "cuda", True)]
)
def test_another_device_keeps_its_generator(
    caplog: pytest.LogCaptureFixture, saved: str, here: str, warned: bool
) -> None:
    state = through(rng.capture(device(saved, 1)))
    target = device(here, 2)
    before = target.generator.get_state()
    with caplog.at_level(logging.WARNING, "ds_run_state"):
        rng.restore(state, target)
    assert torch.equal(target.generator.get_state(), before)
    assert ("random state" in caplog.text) == warned


def test_numpy_is_left_alone_when_nobody_has_imported_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "numpy")
    assert "numpy" not in rng.capture(device("cpu", 1))


def test_importing_the_package_loads_no_torch() -> None:
    code = "import sys, ds_checkpoint, ds_checkpoint.folder.format; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "False", done.stderr
