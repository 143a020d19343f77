"""Adam with moments in 8 bits: the numbers, memory, and training as with moments in fp32."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import ds_optimizers
import pytest
import torch
from ds_optimizers.eight_bit.blocks import SIZE, Blocks, numbers
from ds_testing import OptimizerConformance, run_ranks
from ds_testing.kits.layouts import runs
from ds_testing.pool import reference
from ds_testing.truth import relative, start
from torch import Tensor, nn

from ds_core.errors import UsageError


class Kit(OptimizerConformance):
    """For its `prepare` only: the layouts ask for it."""


def spread(count: int, signed: bool) -> Tensor:
    """Values over ten decades."""
    make = torch.Generator().manual_seed(0)
    sizes = 10 ** (-10 * torch.rand(count, generator=make))
    return sizes * torch.randn(count, generator=make).sign() if signed else sizes


@pytest.mark.parametrize("signed", [True, False])
def test_numbers_are_dense_where_they_are_small(signed: bool) -> None:
    known = numbers(signed)
    assert known.unique().numel() == 256
    assert bool(known.min() < 0) is signed
    for decade in range(7):
        low, high = 10.0 ** -(decade + 1), 10.0**-decade
        count = int(((known > low) & (known < high)).sum())
        assert count == 2 ** (6 - decade) * (1 if signed else 2)


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("first", [0, 100])
def test_values_are_the_nearest_of_each_block(signed: bool, first: int) -> None:
    values = spread(1000, signed)
    stored = Blocks.of(values, signed, first)
    known = numbers(signed).double()
    edges = [0, *range(SIZE - first, 1000, SIZE), 1000]
    for begin, end in itertools.pairwise(edges):
        block = values[begin:end].double()
        scale = block[block.abs().argmax()]
        off = (block[:, None] / scale - known).abs().amin(1)
        found = ((stored.dense()[begin:end].double() - block) / scale).abs()
        # A second moment that is not 0 is not stored as 0, of which 1e-7 is the price; and a number
        # that is as near in 16 bits may be taken.
        near = off + 2**-8 * (block / scale).abs() + 5e-7
        assert bool((found <= near).all())
    if not signed:
        assert bool((stored.dense() > 0).all())


def test_what_is_stored_again_is_the_same() -> None:
    stored = Blocks.of(spread(700, True).view(70, 10), True, 9)
    again = Blocks.of(stored.dense(), True, 9)
    assert torch.equal(again.codes, stored.codes) and torch.equal(again.scales, stored.scales)
    assert torch.equal(copy.deepcopy(stored).dense(), stored.dense())
    assert torch.equal(stored * 2, stored.dense() * 2)
    with pytest.raises(UsageError, match="kept in fewer bytes; put a new tensor in its place"):
        stored.add_(1)


def layers() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(80, 70), nn.Tanh(), nn.Linear(70, 65))


def test_states_take_a_quarter_of_the_memory() -> None:
    model = layers()
    optimizer = ds_optimizers.AdamW8bit(model.parameters())
    model(torch.randn(4, 80)).square().mean().backward()
    optimizer.step()
    for param in model.parameters():
        state = optimizer.state[param]
        narrow = [isinstance(state[key], Blocks) for key in ("exp_avg", "exp_avg_sq")]
        assert narrow == [param.dim() == 2] * 2
        if param.dim() == 2:
            blocks = -(-param.numel() // SIZE)
            taken = sum(state[key].bytes_taken for key in ("exp_avg", "exp_avg_sq"))
            assert taken == 2 * (param.numel() + 4 * blocks)
            # Nothing else is kept: the tensor that checkpoints see has no memory of its own.
            with pytest.raises(RuntimeError, match="data pointer"):
                state["exp_avg"].untyped_storage().data_ptr()


@pytest.mark.parametrize("kind", ["Adam8bit", "AdamW8bit"])
def test_training_is_that_of_fp32_moments(kind: str) -> None:
    options: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1}
    options |= {"adam_w_mode": False} if kind == "Adam8bit" else {}
    weights = []
    for cls, more in ((kind, {"min_8bit_size": 0}), (kind[:-4], {})):
        model = layers()
        optimizer = getattr(ds_optimizers, cls)(model.parameters(), **options, **more)
        for step in range(30):
            x = torch.randn(16, 80, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            (model(x) - x[:, :65]).square().mean().backward()
            optimizer.step()
        weights.append([p.detach() for p in model.parameters()])
    start_ = [p.detach() for p in layers().parameters()]
    for found, wanted, before in zip(*weights, start_, strict=True):
        assert 1e-4 < relative(found, wanted) < 2e-2
        # Far less than what training has changed.
        assert relative(found - before, wanted - before) < 0.1


WANTED = ("AdamW8bit", {"lr": 2e-3, "weight_decay": 0.1, "min_8bit_size": 50})


def fp32(params: Any) -> torch.optim.Optimizer:
    return ds_optimizers.AdamW(list(params.values()), lr=2e-3, weight_decay=0.1)


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_layout_is_near_fp32_moments_of_one_process(world: int) -> None:
    names = [name for name, layout in runs.LAYOUTS.items() if layout.world == world]
    found = run_ranks(world, runs.train_all, reference(Kit), [WANTED], names, "float32", [], 4)
    truth = runs.train_alone(fp32, "float32", 4)
    alone = runs.train_alone(
        lambda p: ds_optimizers.AdamW8bit(list(p.values()), **WANTED[1]), "float32", 4
    )
    for rank in found:
        for layout, weights in zip(names, rank[0], strict=True):
            assert not isinstance(weights, str), weights
            for name, weight in weights.items():
                assert relative(weight, truth[name]) < 2e-3, (layout, name)
                # Blocks of whole parameters; of a weight that stages share none is kept.
                if layout in ("dp 2", "dp 4", "pp") and not (layout == "pp" and "tied" in name):
                    assert relative(weight, alone[name]) < 1e-6, (layout, name)


@pytest.mark.parametrize(
    "route",
    [runs.ROUTES[0], *(pytest.param(r, marks=pytest.mark.slow) for r in runs.ROUTES[1:])],
)
def test_checkpoints_go_to_any_layout(route: tuple[str, str], tmp_path: Path) -> None:
    first, then = (runs.LAYOUTS[layout].world for layout in route)
    kit = reference(Kit)
    saved = run_ranks(first, runs.save_all, kit, [WANTED], route[0], [], str(tmp_path), 2)
    assert saved == [[None]] * first
    found = run_ranks(then, runs.resume_all, kit, [WANTED], route[1], [], str(tmp_path), [2, 3])
    truth = runs.train_alone(fp32, "float64", 4)
    for (weights,) in found:
        for name, weight in weights.items():
            assert relative(weight, truth[name]) < 2e-3, name


def test_states_leave_the_device_and_come_back() -> None:
    """``offload_states`` and ``reload_states`` between steps change nothing."""
    found = []
    for leaves in (False, True):
        optimizer = {"type": "AdamW8bit", "params": {"lr": 1e-3}}
        zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
        engine = start(layers(), micro=4, optimizer=optimizer, zero_optimization=zero)
        for step in range(3):
            x = torch.randn(4, 80, generator=torch.Generator().manual_seed(step))
            engine.backward(engine(x).square().mean())
            engine.step()
            if leaves:
                engine.offload_states()
                engine.reload_states()
        found.append([p.detach().clone() for p in engine.module.parameters()])
        engine.destroy()
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def on_disk(device: str, folder: str) -> tuple[list[bool], torch.Tensor]:
    """Whether the moments are evicted after two steps, and the first moment of a weight."""
    from ds_access import safe_get_full_optimizer_state
    from ds_state_stores import is_evicted
    from ds_testing.truth import start
    from torch import nn

    torch.manual_seed(0)
    offload = {"device": device, "nvme_path": folder} if device == "nvme" else {"device": device}
    engine = start(
        nn.Linear(64, 8),
        optimizer={"type": "AdamW8bit", "params": {"min_8bit_size": 0}},
        zero_optimization={"stage": 2, "offload_optimizer": offload},
    )
    for step in range(2):
        torch.manual_seed(step)
        engine.backward(engine(torch.randn(4, 64)).square().mean())
        engine.step()
    states = [s[k] for s in engine.optimizer.state.values() for k in ("exp_avg", "exp_avg_sq")]
    evicted = [is_evicted(state) for state in states if state.numel()]
    found = safe_get_full_optimizer_state(engine.module.weight, "exp_avg")
    engine.destroy()
    return evicted, found.cpu()


def test_a_store_has_the_bytes_of_moments(tmp_path: Path) -> None:
    disk = run_ranks(2, on_disk, "nvme", str(tmp_path))
    memory = run_ranks(2, on_disk, "cpu", str(tmp_path))
    for (evicted, found), (stays, wanted) in zip(disk, memory, strict=True):
        assert all(evicted) and not any(stays)
        assert torch.equal(found, wanted) and bool(found.any())
