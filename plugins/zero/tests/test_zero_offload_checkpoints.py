"""Checkpoints go between all offload choices, and resuming is exact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ds_testing import run_ranks
from torch import Tensor

from plugins.zero.tests.offload_models import ALL, DISK, STATES, make, steps, whole

GLOBAL = 4


def saved(folder: Path, dtype: str, zero: dict[str, Any]) -> dict[str, Tensor]:
    """Save after two steps, train two more."""
    from ds_core import comm

    gas = GLOBAL // comm.world_size()
    engine = make(zero, folder, dtype=dtype, gradient_accumulation_steps=gas)
    shared_steps(engine, range(2), gas)
    engine.save_checkpoint(str(folder / "saved"), tag="two")
    shared_steps(engine, range(2, 4), gas)
    found = whole(engine)
    engine.destroy()
    return found


def resumed(folder: Path, dtype: str, zero: dict[str, Any]) -> dict[str, Tensor]:
    from ds_core import comm

    gas = GLOBAL // comm.world_size()
    engine = make(zero, folder, dtype=dtype, gradient_accumulation_steps=gas)
    shared_steps(engine, range(7, 8), gas)  # the states to be replaced are not empty
    engine.load_checkpoint(str(folder / "saved"), tag="two")
    for piece in engine.partitioner.fragments.values() if zero["stage"] else ():
        for key, value in engine.optimizer.state.get(piece.master, {}).items():
            if value.dim():
                assert (value.device, value.stride()) == (
                    piece.master.device,
                    piece.master.stride(),
                ), key
    shared_steps(engine, range(2, 4), gas)
    found = whole(engine)
    engine.destroy()
    return found


def shared_steps(engine: Any, which: range, gas: int) -> None:
    """The same micro-batches at every world size."""
    from ds_core import comm

    dtype = engine.ctx.precision.param or torch.float32
    for step in which:
        for micro in range(gas):
            seed = 100 * step + micro * comm.world_size() + comm.rank()
            x = torch.randn(2, 7, generator=torch.Generator().manual_seed(seed)).to(dtype)
            engine.backward(engine(x))
            engine.step()


@pytest.mark.fast_cases("source6-target6-bfloat16")
@pytest.mark.parametrize(
    ("source", "target", "dtype"),
    [
        (({"stage": 3, **ALL}, 4), ({"stage": 0}, 1), "float32"),
        (({"stage": 0}, 1), ({"stage": 3, **ALL}, 2), "bfloat16"),
        (({"stage": 0}, 1), ({"stage": 3, **ALL}, 1), "float32"),
        (({"stage": 2}, 2), ({"stage": 2, **STATES}, 4), "float32"),
        (({"stage": 1, **STATES}, 2), ({"stage": 3, **DISK}, 2), "bfloat16"),
        (({"stage": 3, **DISK}, 2), ({"stage": 3, **DISK}, 4), "float32"),
        (({"stage": 3, **DISK}, 4), ({"stage": 1}, 2), "bfloat16"),
    ],
)
def test_checkpoints_go_between_offload_choices(
    source: Any, target: Any, dtype: str, tmp_path: Path
) -> None:
    truth = run_ranks(source[1], saved, tmp_path, dtype, source[0])[0]
    found = run_ranks(target[1], resumed, tmp_path, dtype, target[0])[0]
    for name, value in truth.items():
        assert torch.allclose(
            found[name], value, rtol=0, atol=1e-6 if dtype == "float32" else 2e-2
        ), name


def both_ways(folder: Path) -> bool:
    """Saved and loaded where nothing else changes, so to the last bit; also a weights-only 16-bit
    file.
    """
    from safetensors.torch import load_file

    engine = make({"stage": 3, **ALL, **DISK}, folder, dtype="bfloat16", checkpoint={"async": True})
    steps(engine, range(2))
    engine.save_checkpoint(str(folder / "saved"), tag="two")
    # no copy of states on disk is made for a thread
    assert (folder / "saved" / "two" / "manifest.json").is_file()
    engine.save_16bit_model(str(folder / "saved"))
    weights = load_file(folder / "saved" / "model.safetensors")
    same = all(torch.equal(weights[n], t.to(torch.bfloat16)) for n, t in whole(engine).items())
    steps(engine, range(2, 4))
    first = whole(engine)
    engine.load_checkpoint(str(folder / "saved"), tag="two")
    steps(engine, range(2, 4))
    second = whole(engine)
    engine.destroy()
    return same and all(torch.equal(first[n], second[n]) for n in first)


def test_resuming_with_states_on_disk_is_exact(tmp_path: Path) -> None:
    assert run_ranks(2, both_ways, tmp_path) == [True, True]
