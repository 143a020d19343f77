"""Checkpoints that FSDP2 wrote are resumed by an engine, and an engine's by FSDP2 and torch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import pytest
import torch
from dcp_runs import load_fsdp, make, resume, save_engine, save_fsdp
from ds_checkpoint.formats.convert import convert
from ds_run_state import RunState

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint"),
]


def close(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    """Sums over ranks round differently than those of one process."""
    return one.keys() == two.keys() and all(
        torch.allclose(t, two[n], rtol=1e-5, atol=1e-7) for n, t in one.items()
    )


@pytest.mark.parametrize("flat", [False, True], ids=["get_state_dict", "torchtitan"])
def test_what_fsdp_wrote_is_resumed(tmp_path: Path, ranks: Any, flat: bool) -> None:
    [(losses, weights), _] = ranks(2, save_fsdp, str(tmp_path / "step-3"), flat)
    # FSDP2 has cut the weights, evenly and not.
    assert len(list((tmp_path / "step-3").glob("*.distcp"))) == 2
    got, found = resume(tmp_path)
    assert got == pytest.approx(losses, rel=1e-5) and close(found, weights)


def test_a_16_bit_run_starts_from_the_fp32_weights(tmp_path: Path, ranks: Any) -> None:
    ranks(2, save_fsdp, str(tmp_path / "a"))
    convert(tmp_path / "a", tmp_path / "b")
    engines = [make(seed=3, bf16={"enabled": True}) for _ in range(2)]
    states = []
    for engine, folder in zip(engines, ("a", "b"), strict=True):
        engine.load_checkpoint(str(tmp_path / folder))
        states.append({s.name: s.tensor for s in RunState(engine).states(engine.optimizer)})
    masters = [name for name in states[0] if name.startswith("master/")]
    assert masters
    for name in masters:
        assert torch.equal(states[0][name], states[1][name])
        # They are not what the 16-bit weights round to.
        weight = states[0][name.replace("master/", "module/")]
        assert torch.equal(states[0][name].bfloat16(), weight)
    assert any(not torch.equal(states[0][n], states[0][n].bfloat16().float()) for n in masters)


@pytest.mark.parametrize("world", [1, 2])
def test_plain_dcp_loads_what_is_exported(tmp_path: Path, ranks: Any, world: int) -> None:
    losses, weights = save_engine(tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "dcp", "dcp")
    if world == 1:
        got, found = load_fsdp(str(tmp_path / "dcp"), sharding=False)
        # The kernels of the two optimizers may round differently.
        assert got == pytest.approx(losses, rel=1e-5) and close(found, weights)
    else:
        [(got, found), _] = ranks(2, load_fsdp, str(tmp_path / "dcp"))
        assert got == pytest.approx(losses, rel=1e-5) and close(found, weights)


def test_an_engine_of_two_ranks_reads_its_own_shards(tmp_path: Path, ranks: Any) -> None:
    [(losses, _), _] = ranks(2, save_fsdp, str(tmp_path / "a"))
    [(got, _), _] = ranks(2, resume_stage_3, str(tmp_path / "a"))
    assert got == pytest.approx(losses, rel=1e-5)


def resume_stage_3(folder: str) -> Any:
    return resume(folder, zero_optimization={"stage": 3})
