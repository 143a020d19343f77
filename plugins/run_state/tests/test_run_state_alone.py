"""A run kept in memory and restored, without a checkpointer: what a checkpointer's author builds
on.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from ds_run_state import RunState, SavedRun
from ds_run_state.slices import Box, Slice, unslice
from ds_run_state.states import StateTensor
from torch import Tensor, nn

import ds_core
from ds_core.engine import LoadOptions
from ds_core.entries import Axis
from ds_core.errors import CheckpointError
from ds_core.mesh import plan_mesh


class Memory:
    """A `StateSource`: states by name, each as a flat tensor and its shape."""

    def __init__(self, run: RunState) -> None:
        self.kept: dict[str, tuple[Tensor, tuple[int, ...]]] = {}
        for piece in run.pieces():
            assert (piece.start, piece.stop) == (0, piece.tensor.numel()), (
                "one process has all of each state"
            )
            self.kept[piece.name] = piece.values().detach().clone().reshape(-1), tuple(piece.shape)

    def names(self) -> Sequence[str]:
        return list(self.kept)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.kept[name][1]

    def read(
        self, name: str, engine_of: int = 0, stop: int | None = None, *, into: object = None
    ) -> Tensor:
        return self.kept[name][0][engine_of:stop].clone()


def engine_of(seed: int, width: int = 4) -> Any:
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(3, width), nn.BatchNorm1d(width), nn.Dropout(0.5), nn.Linear(width, 1)
    )
    config = {"train_batch_size": 4, "optimizer": {"type": "AdamW", "params": {"lr": 0.05}}}
    rows = [torch.randn(3, generator=torch.Generator().manual_seed(i)) for i in range(16)]
    return ds_core.initialize(model=model, config=config, training_data=rows)[0]


def losses_of(engine: Any, batches: Any, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = engine(next(batches)).square().mean() + random.random()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def test_a_restored_run_goes_on_as_the_saved_one() -> None:
    engine = engine_of(0)
    batches = iter(engine.training_dataloader)
    losses_of(engine, batches, 2)
    run = RunState(engine)
    common, local = copy.deepcopy((run.common(), run.local()))
    saved = SavedRun(Memory(run), common, local, own=True, world_size=1)
    wanted = losses_of(engine, batches, 2)

    other = engine_of(1)
    again = RunState(other)
    options = LoadOptions()
    assert again.check(saved.states, options) == []
    again.restore(saved, options)
    assert again.step == 2
    assert losses_of(other, iter(other.training_dataloader), 2) == wanted
    for a, b in zip(
        engine.module.state_dict().values(), other.module.state_dict().values(), strict=True
    ):
        assert torch.equal(a, b)


def test_a_state_that_does_not_fit_is_refused() -> None:
    memory = Memory(RunState(engine_of(0)))
    with pytest.raises(
        CheckpointError, match=r"0\.weight has shape \(4, 3\) there and \(5, 3\) here"
    ):
        RunState(engine_of(0, width=5)).check(memory, LoadOptions())
    del memory.kept["module/3.bias"]
    with pytest.raises(CheckpointError, match=r"it has no 3\.bias.*load_module_strict=False"):
        RunState(engine_of(0)).check(memory, LoadOptions())


def test_states_of_another_shape_stay_the_ranks_own() -> None:
    mesh = plan_mesh([Axis("ep", 2, inside="dp")], 2, 1)
    slices = {"a.b": Slice.of((4, 3)).cut("ep", 0, 2, 2)}
    states = [
        StateTensor("module/a.b", torch.zeros(2, 3), (2, 3), 1, 5, ("ep",), True),
        StateTensor("optimizer/step/a.b", torch.zeros(()), (), 0, 1, ("ep",), True),
        StateTensor("optimizer/rows/a.b", torch.zeros(2), (2,), 0, 2, ("ep",), True),
        StateTensor("module/other", torch.zeros(2, 3), (2, 3), 0, 6, ("ep",), True),
    ]
    cut, counter, *rest = unslice(states, slices, mesh)
    assert (cut.shape, cut.start, cut.stop, cut.held) == ((4, 3), 7, 11, ())
    assert (counter.held, counter.store) == ((), False)
    assert rest == states[2:]
    assert list(unslice(states, None, mesh)) == states


def test_a_box_is_cut_out_of_the_full_parameter() -> None:
    piece = Slice.of((4, 6)).cut("ep", 0, 2, 2).cut("tp", 1, 1, 3)
    full = torch.arange(24).reshape(4, 6)
    assert piece.take(full).tolist() == [[13, 14, 15], [19, 20, 21]]
    assert piece.axes == ("ep", "tp")
    with pytest.raises(ValueError, match=r"\[3, 5\) of dimension 0 is not inside \[2, 4\)"):
        piece.cut("ep", 0, 3, 2)
    mesh = plan_mesh([Axis("ep", 2, inside="dp"), Axis("tp", 2)], 4, 1)
    state = StateTensor("module/a", torch.zeros(2, 3), (2, 3), 0, 6, ("ep", "tp"), True)
    (boxed,) = unslice([state], {"a": piece}, mesh)
    assert boxed == dataclasses.replace(state, shape=(4, 6), box=Box((2, 1), (2, 3)), held=())


@pytest.mark.parametrize("shape", [(10, 3), (3, 10), (2, 10, 3)])
def test_fused_matrices_are_cut_each(shape: tuple[int, ...]) -> None:
    """Whatever range of its part a rank has: views of it, each a range of one box of the whole."""
    dim = shape.index(10)
    full = torch.arange(math.prod(shape)).view(shape)
    piece = Slice.of(shape).keep("tp", dim, [(1, 2), (6, 0), (7, 3)])
    assert piece.size == tuple(5 if n == 10 else n for n in shape)
    mine = piece.take(full)
    assert torch.equal(mine, full.index_select(dim, torch.tensor([1, 2, 7, 8, 9])))
    flat = mine.reshape(-1)
    mesh = plan_mesh([Axis("tp", 2)], 2, 1)
    for engine_of, stop in itertools.combinations(range(0, flat.numel() + 1, 2), 2):
        part = flat[engine_of:stop]
        state = StateTensor("module/a", part, piece.size, engine_of, stop, ("tp",), True)
        found = torch.full(shape, -1)
        for one in unslice([state], {"a": piece}, mesh):
            box = one.box or Box.whole(shape)
            assert one.tensor.untyped_storage().data_ptr() == part.untyped_storage().data_ptr()
            indices = (
                torch.arange(math.prod(shape))
                .view(shape)[box.slices()]
                .reshape(-1)[one.start : one.stop]
            )
            assert one.tensor.numel() == indices.numel() and bool(
                (found.view(-1)[indices] == -1).all()
            )
            found.view(-1)[indices] = one.tensor.reshape(-1)
        assert sorted(found[found >= 0].tolist()) == sorted(part.tolist())
        assert torch.equal(found[found >= 0], full[found >= 0])
    for wrong, words in (
        ([(0, 2), (1, 3)], "does not come after 2"),
        ([(8, 3)], r"not inside \[0, 10\)"),
    ):
        with pytest.raises(ValueError, match=words):
            Slice.of(shape).keep("tp", dim, wrong)
    with pytest.raises(ValueError, match="second one with several ranges"):
        piece.keep("ep", 1 - dim if dim < 2 and len(shape) == 2 else 0, [(0, 1), (1, 1)])
