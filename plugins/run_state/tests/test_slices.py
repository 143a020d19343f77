"""Slices: checkpoints and exports have whole parameters, whatever the sizes of axes and whoever
partitions.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))

from ds_checkpoint import open_saved
from ds_checkpoint.folder.format import checksum
from ds_checkpoint.folder.layout import merge
from ds_run_state.slices import SLICES, Slice
from ds_testing import run_ranks
from ds_testing.truth import whole_weights

import ds_core
from ds_core.errors import CheckpointError

SHAPES = {
    "rows": (8, 3, 2),
    "rows_of_one": (8,),
    "plain": (5,),
    "columns": (3, 7, 4),
    "columns_end": (5, 7),
}
SHAPES |= {"both": (4, 7, 3), "both_end": (8, 7)}
SHAPES |= {
    "fused": (10, 3),
    "fused_bias": (10,),
    "fused_columns": (3, 10, 2),
    "fused_both": (4, 10),
}
ADAM = {"lr": 0.1, "weight_decay": 0.1, "eps": 1e-6}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))

    def forward(self, step: int, slices: Any, more: float) -> torch.Tensor:
        """A loss whose gradients tell every element apart; more: what those of rows are multiplied
        by.
        """
        torch.manual_seed(step)
        total = torch.zeros(())
        for name, shape in SHAPES.items():
            piece = slices.get(name, Slice.of(shape))
            times = more if "ep" in piece.axes else 1
            total = (
                total
                + times * (getattr(self, name) * piece.take(torch.randn(shape))).square().sum()
            )
        return total


def truth(steps: int) -> dict[str, torch.Tensor]:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    for step in range(steps):
        model(step, {}, 1).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = {f"module/{n}": p.detach() for n, p in model.named_parameters()}
    for name, param in model.named_parameters():
        found[f"optimizer/exp_avg/{name}"] = optimizer.state[param]["exp_avg"]
    return found


def make(ep: int, tp: int, stage: int) -> Any:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": ADAM},
        "plugins": {"load": ["ds_zero.plugin", "slices=slices_plugin"]},
        "slices": {"ep": ep, "tp": tp},
    }
    if stage:
        config["zero_optimization"] = {"stage": stage, "param_persistence_threshold": 0}
    return ds_core.initialize(model=Model(), config=config)[0]


def step(engine: Any, number: int) -> None:
    # The gradient of a row that is on one rank of `ep` only is averaged over all of dp.
    engine.backward(engine(number, engine.ctx.stash[SLICES], engine.ctx.mesh.size("ep")))
    engine.step()


def save(ep: int, tp: int, stage: int, folder: str) -> None:
    engine = make(ep, tp, stage)
    step(engine, 0)
    engine.save_checkpoint(folder)
    engine.save_16bit_model(folder)
    whole = whole_weights(engine)
    assert {n: tuple(w.shape) for n, w in whole.items()} == SHAPES
    for name, values in truth(1).items():
        if name.startswith("module/"):
            assert torch.allclose(whole[name.removeprefix("module/")].float(), values, atol=1e-6), (
                name
            )
    engine.destroy()


def resume(runs: list[tuple[int, int, int]], folder: str) -> list[float]:
    """How far from the truth each run is after loading and one more step."""
    wanted = truth(2)
    found = []
    for ep, tp, stage in runs:
        engine = make(ep, tp, stage)
        engine.load_checkpoint(folder)
        step(engine, 1)
        engine.destroy()
        worst = 0.0
        for name, param in engine.module.named_parameters():
            whole = wanted[f"module/{name}"]
            piece = engine.ctx.stash[SLICES].get(name)
            mine = whole if piece is None else piece.take(whole)
            worst = max(worst, float((param.detach() - mine).abs().max()))
        found.append(worst)
    return found


SAVED = [
    (1, 1, 1, 0),
    (4, 1, 2, 3),
    *(
        pytest.param(*c, marks=pytest.mark.slow)
        for c in [
            (2, 2, 1, 3),
            (2, 1, 2, 1),
            (4, 2, 2, 0),
            (4, 4, 1, 0),
            (4, 2, 1, 2),
            (4, 1, 4, 0),
        ]
    ),
]


@pytest.mark.fast_cases("4-1-2-3")
@pytest.mark.parametrize(("world", "ep", "tp", "stage"), SAVED)
def test_any_size_and_partitioner_reads_what_another_saved(
    world: int, ep: int, tp: int, stage: int, tmp_path: Path
) -> None:
    run_ranks(world, save, ep, tp, stage, str(tmp_path))
    wanted = truth(1)
    with open_saved(tmp_path) as saved:
        for name, values in wanted.items():
            assert torch.allclose(saved.source.whole(name), values, atol=1e-6), name
        steps = [s for s in saved.manifest.states if s.name.startswith("optimizer/step/")]
        assert len(steps) == len(SHAPES) and all(s.at == {} for s in saved.manifest.states)
        boxed = {
            s.name.rpartition("/")[2] for s in saved.manifest.states if any(c.box for c in s.chunks)
        }
        columns = {"columns", "columns_end", "both", "both_end", "fused_columns", "fused_both"}
        assert boxed == (columns if tp > 1 else set())
    exported = load_file(tmp_path / "model.safetensors")
    for name, values in exported.items():
        assert torch.allclose(values.float(), wanted[f"module/{name}"], atol=2e-2), name
    again = {
        1: [(1, 1, 1)],
        2: [(2, 1, 0), (1, 2, 3)],
        4: [(4, 1, 2), (2, 2, 0), (1, 4, 0), (1, 2, 3)],
    }
    for size, runs in again.items():
        for rank, off in enumerate(run_ranks(size, resume, runs, str(tmp_path))):
            assert max(off) < 1e-5, f"rank {rank} of {size}: {off}"


@pytest.mark.parametrize("change", ["lost", "moved", "twice"])
def test_boxes_that_leave_something_out_are_told_of(change: str, tmp_path: Path) -> None:
    run_ranks(2, save, 1, 2, 0, str(tmp_path))
    path = tmp_path / "global_step1" / "manifest.json"
    text = path.read_bytes()
    box = b'"box": {"first": [0, 1], "size": [5, 6]}'
    assert box in text
    other = {"lost": b"[5, 5]", "moved": b"[5, 7]", "twice": b"[5, 6]"}[change]
    changed = box.replace(b"[5, 6]", other).replace(
        b"[0, 1]", b"[0, 0]" if change == "twice" else b"[0, 1]"
    )
    body = text.replace(box, changed).rpartition(b',\n "checksum": "')[0]
    path.write_bytes(body + b',\n "checksum": "' + checksum(body).encode() + b'"\n}\n')
    with pytest.raises(CheckpointError, match="columns_end.*damaged"), open_saved(tmp_path):
        pass


def test_a_state_that_is_each_coordinates_own_may_be_a_part_of_the_whole(tmp_path: Path) -> None:
    """As experts of format 2 are: whole along ep, and what tp leaves here along tp."""
    from ds_checkpoint.source import SavedStates
    from ds_checkpoint.storages.disk import DiskCheckpoint

    run_ranks(2, save, 2, 1, 0, str(tmp_path))
    with open_saved(tmp_path) as saved:
        manifest = saved.manifest
    states = [
        dataclasses.replace(s, at={"tp": 1}) for s in manifest.states if s.name == "module/rows"
    ]
    manifest = dataclasses.replace(manifest, states=tuple(states))
    # of which (8, 3, 2) is stored
    piece = Slice.of((8, 6, 2)).cut("ep", 0, 4, 4).cut("tp", 1, 3, 3)
    source = SavedStates(DiskCheckpoint(tmp_path / "global_step1"), manifest, None, {"rows": piece})
    assert source.shape("module/rows") == (4, 3, 2)
    assert torch.allclose(source.whole("module/rows"), truth(1)["module/rows"][4:], atol=1e-6)
    source.close()


def test_ranks_that_have_nothing_of_it_do_not_matter() -> None:
    """Where one has all columns, its rows are a range of the whole; the others have boxes without
    elements.
    """
    rows = [
        {
            "name": "a",
            "at": {},
            "shape": [4, 7],
            "dtype": "F32",
            "chunk": ["x", "a", low, high],
            "box": box,
        }
        for low, high, box in (
            (0, 14, None),
            (14, 28, None),
            (0, 0, [(0, 7), (2, 0)]),
            (0, 0, [(2, 7), (2, 0)]),
        )
    ]
    assert len(merge(rows)[0].chunks) == 4
