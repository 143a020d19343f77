"""Checkpoints of compressed models: resumed at another world size and stage, loaded into plain
models, and cleaned.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ds_compression import init_compression, redundancy_clean

from ds_core import comm
from ds_core.errors import UsageError

sys.path.insert(0, str(Path(__file__).parent))
from compressed_runs import STEPS, Result, batch, config, loss_of, net, off, trained  # noqa: E402
from test_compression_numbers import BODY, CASES, technique  # noqa: E402

STAGE = {stage: {"zero_optimization": {"stage": stage}} for stage in (0, 1, 2, 3)}
NOISY = technique(
    "weight_quantization", {"rounding": "stochastic"}, {"start_bits": 4, "target_bits": 4}, BODY
)
ALL = {
    **technique(
        "weight_quantization", {"schedule_offset": 1}, {"start_bits": 7, "target_bits": 5}, BODY
    ),
    **technique(
        "activation_quantization",
        {"schedule_offset": 2, "range_calibration": "static"},
        {"bits": 6},
        ["down"],
    ),
    **technique(
        "row_pruning", {"schedule_offset": 2, "method": "l1"}, {"dense_ratio": 0.5}, ["up"]
    ),
    **technique(
        "head_pruning", {"schedule_offset": 1, "num_heads": 4}, {"dense_ratio": 0.5}, ["down"]
    ),
    **CASES["snip_momentum"][0],
}
"""Everything at once; some of it begins, and has changed, on either side of the checkpoint."""


def saved(folder: str, half: int, gas: int, stage: int) -> Result:
    return trained(ALL, gas, STAGE[stage], steps=half, save=folder)


def resumed(folder: str, half: int, gas: int, stage: int) -> Result:
    return trained(ALL, gas, STAGE[stage], first=half, load=folder)


def whole(section: Any, gas: int, stage: int) -> Result:
    return trained(section, gas, STAGE[stage])


def check(
    ranks: Any,
    folder: Path,
    before: tuple[int, int, int],
    after: tuple[int, int, int],
    half: int = 3,
) -> None:
    """A run that is resumed at another world size, accumulation and stage is the run that was not
    interrupted.
    """
    (truth,) = ranks(1, whole, ALL, 1, 0)
    first = ranks(before[0], saved, str(folder), half, *before[1:])
    second = ranks(after[0], resumed, str(folder), half, *after[1:])
    for a, b in zip(first * after[0], second * before[0], strict=True):
        assert off((a[0] + b[0], b[1]), truth) < 1e-6


def test_resumed_at_another_size_and_stage(ranks: Any, tmp_path: Path) -> None:
    check(ranks, tmp_path, (2, 1, 3), (1, 2, 0))


@pytest.mark.slow
@pytest.mark.parametrize("half", [1, 2, 4, 5])
@pytest.mark.parametrize(
    "sizes", [((1, 1, 0), (4, 1, 3)), ((4, 2, 2), (2, 1, 3)), ((2, 2, 3), (2, 1, 1))]
)
def test_resumed(ranks: Any, tmp_path: Path, half: int, sizes: Any) -> None:
    check(ranks, tmp_path, *sizes, half)


def test_stochastic_rounding_is_the_same_on_all_ranks(ranks: Any) -> None:
    (truth,) = ranks(1, whole, NOISY, 1, 0)
    for found in ranks(2, whole, NOISY, 2, 3):
        assert off(found, truth) < 1e-6


def exported(folder: str) -> None:
    """Train under stage 3, export, and refuse to clean what is partitioned."""
    from ds_zero import GatheredParameters

    import ds_core

    engine, *_ = ds_core.initialize(model=net(), config=config(ALL, **STAGE[3]))
    for step in range(STEPS):
        x = batch(step).chunk(2)[comm.rank()]
        engine.backward(loss_of(engine(x), x))
        engine.step()
    with pytest.raises(UsageError, match="sharded over ranks"):
        redundancy_clean(engine.module, config(ALL))
    engine.eval()
    with torch.no_grad():
        outputs = engine(batch(0))
    engine.save_16bit_model(folder, "model.safetensors")
    with GatheredParameters(engine.module):
        state = {name: tensor.clone() for name, tensor in engine.module.state_dict().items()}
    if comm.rank() == 0:
        torch.save({"outputs": outputs, "state": state}, Path(folder) / "exact.pt")
    engine.destroy()


def test_an_export_is_loaded_and_cleaned(ranks: Any, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    ranks(2, exported, str(tmp_path))
    model = init_compression(net().eval(), config(ALL))
    exact = torch.load(tmp_path / "exact.pt", weights_only=True)
    rounded = load_file(tmp_path / "model.safetensors")
    assert set(rounded) == set(exact["state"]) == set(model.state_dict()) > set(net().state_dict())
    model.load_state_dict(exact["state"])
    redundancy_clean(model, config(ALL))
    assert set(model.state_dict()) == {*net().state_dict(), "down.activation_range"}
    assert torch.allclose(model(batch(0)), exact["outputs"], atol=1e-9)


def dense_then_compressed(folder: str) -> tuple[bool, bool]:
    """A checkpoint without compression starts a compressed run: names are the same."""
    import ds_core

    engine, *_ = ds_core.initialize(model=net(), config=config({}, **STAGE[1]))
    engine.save_checkpoint(folder)
    engine.destroy()
    section = technique("weight_quantization", {}, {"start_bits": 4, "target_bits": 4}, BODY)
    engine, *_ = ds_core.initialize(model=net(9), config=config(section, **STAGE[3]))
    engine.load_checkpoint(folder)
    with torch.no_grad():
        out = engine(batch(0))
    engine.destroy()
    wanted = init_compression(net(), config(section))(batch(0))
    return bool(torch.equal(out, wanted)), bool(torch.equal(out, net()(batch(0))))


def test_a_dense_checkpoint_starts_a_compressed_run(ranks: Any, tmp_path: Path) -> None:
    assert ranks(2, dense_then_compressed, str(tmp_path)) == [(True, False)] * 2
