"""Slices: checkpoints and exports have whole parameters, whatever the sizes of axes and whoever partitions."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))

import ds_core
from ds_core.checkpoint import open_saved
from ds_core.slices import SLICES, Slice, as_wholes
from ds_core.testing import run_ranks

ADAM = {"lr": 0.1, "weight_decay": 0.1, "eps": 1e-6}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.rows = nn.Parameter(torch.randn(8, 3, 2))
        self.rows_of_one = nn.Parameter(torch.randn(8))
        self.plain = nn.Parameter(torch.randn(5))

    def forward(self, step: int, at: Any) -> torch.Tensor:
        """A loss whose gradients tell every element apart; at: per parameter which rows of the whole are here."""
        torch.manual_seed(step)
        total = torch.zeros(())
        for name, whole in (("rows", (8, 3, 2)), ("rows_of_one", (8,)), ("plain", (5,))):
            param, factor = getattr(self, name), torch.randn(whole)
            first, more = at.get(name, (0, 1))
            total = total + more * (param * factor[first : first + param.shape[0]]).square().sum()
        return total


def truth(steps: int) -> dict[str, torch.Tensor]:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    for step in range(steps):
        model(step, {}).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = {f"module/{n}": p.detach() for n, p in model.named_parameters()}
    for name, param in model.named_parameters():
        found[f"optimizer/exp_avg/{name}"] = optimizer.state[param]["exp_avg"]
    return found


def make(size: int, stage: int) -> Any:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": ADAM},
        "plugins": {"load": ["ds_zero.plugin", "rows=rows_plugin"]},
        "rows": {"size": size},
    }
    if stage:
        config["zero_optimization"] = {"stage": stage, "param_persistence_threshold": 0}
    return ds_core.initialize(model=Model(), config=config)[0]


def step(engine: Any, number: int) -> None:
    size = engine.ctx.mesh.size("ep")
    # The gradient of a row that is on one rank of `size` only is averaged over all of dp.
    at = {name: (piece.first, size) for name, piece in engine.ctx.stash[SLICES].items()}
    engine.backward(engine(number, at))
    engine.step()


def save(size: int, stage: int, folder: str) -> None:
    engine = make(size, stage)
    step(engine, 0)
    engine.save_checkpoint(folder)
    engine.save_16bit_model(folder)
    engine.destroy()


def resume(runs: list[tuple[int, int]], folder: str) -> list[float]:
    """How far from the truth each run is after loading and one more step."""
    wanted, found = truth(2), []
    for size, stage in runs:
        engine = make(size, stage)
        engine.load_checkpoint(folder)
        step(engine, 1)
        engine.destroy()
        worst = 0.0
        for name, param in engine.module.named_parameters():
            whole, piece = wanted[f"module/{name}"], engine.ctx.stash[SLICES].get(name)
            mine = whole if piece is None else whole[piece.first : piece.first + piece.rows]
            worst = max(worst, float((param.detach() - mine).abs().max()))
        found.append(worst)
    return found


@pytest.mark.parametrize(("world", "size", "stage"), [(4, 4, 0), (4, 2, 2), (2, 2, 3), (1, 1, 0)])
def test_any_size_and_partitioner_reads_what_another_saved(world: int, size: int, stage: int, tmp_path: Path) -> None:
    run_ranks(world, save, size, stage, str(tmp_path))
    wanted = truth(1)
    with open_saved(tmp_path) as saved:
        for name, values in wanted.items():
            assert torch.allclose(saved.source.whole(name), values, atol=1e-6), name
        steps = [s for s in saved.manifest.states if s.name.startswith("optimizer/step/")]
        assert len(steps) == 3 and all(s.at == {} for s in saved.manifest.states)
    exported = load_file(tmp_path / "model.safetensors")
    for name, values in exported.items():
        assert torch.allclose(values.float(), wanted[f"module/{name}"], atol=2e-2), name
    for again, runs in ((1, [(1, 1)]), (2, [(2, 0), (1, 3)]), (4, [(4, 2), (2, 3)])):
        for rank, off in enumerate(run_ranks(again, resume, runs, str(tmp_path))):
            assert max(off) < 1e-5, f"rank {rank} of {again}: {off}"


def test_states_of_another_shape_stay_the_ranks_own() -> None:
    from ds_core.entries import Axis
    from ds_core.mesh import plan_mesh
    from ds_core.partition import StateTensor

    mesh = plan_mesh([Axis("ep", 2, inside="dp")], 2, 1)
    slices = {"a.b": Slice("ep", (4, 3), 2, 2)}
    states = [
        StateTensor("module/a.b", torch.zeros(2, 3), (2, 3), 1, 5, ("ep",), True),
        StateTensor("optimizer/step/a.b", torch.zeros(()), (), 0, 1, ("ep",), True),
        StateTensor("optimizer/rows/a.b", torch.zeros(2), (2,), 0, 2, ("ep",), True),
        StateTensor("module/other", torch.zeros(2, 3), (2, 3), 0, 6, ("ep",), True),
    ]
    cut, counter, *rest = as_wholes(states, slices, mesh)
    assert (cut.shape, cut.start, cut.stop, cut.held) == ((4, 3), 7, 11, ())
    assert (counter.held, counter.store) == ((), False)
    assert rest == states[2:] and list(as_wholes(states, None, mesh)) == states
