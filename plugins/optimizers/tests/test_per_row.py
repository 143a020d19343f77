"""Second moments of AdamMini: one value per row in memory, one per element to everybody else."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import pytest
import torch
from ds_optimizers import AdamMini
from ds_optimizers.moments.compact import PerRow
from ds_optimizers.moments.rows import Rows
from ds_testing import run_ranks
from torch import nn

from ds_core.errors import UsageError


def rows_of(count: int, columns: int, start: int, stop: int) -> Rows:
    """Of a matrix, of which this rank has a range."""
    numbers = torch.arange(start // columns, math.ceil(stop / columns))
    return Rows(count, columns, numbers, columns, start % columns, -stop % columns)


@pytest.mark.parametrize(("start", "stop"), [(0, 20), (3, 18), (5, 10), (6, 9), (4, 6), (7, 7)])
def test_a_range_that_ends_within_rows_is_read_as_elements(start: int, stop: int) -> None:
    rows = rows_of(4, 5, start, stop)
    # Of which the mean of equal ones is rounded if it is a sum of all, divided.
    dense = (torch.arange(1, 5) / 3).repeat_interleave(5)[start:stop]
    stored = PerRow.of(dense, rows)
    assert torch.equal(stored * 1, dense)
    assert stored.bytes_taken == 4 * len(rows.numbers)
    assert torch.equal(copy.deepcopy(stored) + 0, dense)


def test_other_values_become_the_mean_of_their_row() -> None:
    dense = torch.arange(12, dtype=torch.float64).view(3, 4)
    stored = PerRow.of(dense, rows_of(3, 4, 0, 12))
    expected = dense.mean(1, keepdim=True).expand(3, 4)
    assert torch.equal(stored * 1, expected)
    with pytest.raises(UsageError, match="would write to a state"):
        stored.zero_()
    # As `safe_set_full_optimizer_state` writes.
    stored.copy_(-dense)
    assert torch.equal(stored * 1, -expected)


def test_a_state_takes_a_value_per_row() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 8))
    optimizer = AdamMini(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
    taken = {p: s["exp_avg_sq"].bytes_taken for p, s in optimizer.state.items()}
    # A vector is one row.
    assert list(taken.values()) == [4 * 32, 4, 4 * 8, 4]
    for param, state in optimizer.state.items():
        assert state["exp_avg_sq"].shape == param.shape


def test_a_loaded_state_goes_on_with_the_same_bits() -> None:
    torch.manual_seed(0)
    model = nn.Linear(16, 8)
    optimizer = AdamMini(model.parameters(), lr=0.1)
    batches = torch.randn(6, 4, 16)

    def train(model: nn.Module, optimizer: AdamMini, batches: torch.Tensor) -> None:
        for batch in batches:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()

    train(model, optimizer, batches[:3])
    other = copy.deepcopy(model)
    resumed = AdamMini(other.parameters(), lr=0.1)
    # As checkpoints have it: plain tensors.
    state = copy.deepcopy(optimizer.state_dict())
    for row in state["state"].values():
        row["exp_avg_sq"] = row["exp_avg_sq"] * 1
    resumed.load_state_dict(state)
    train(model, optimizer, batches[3:])
    train(other, resumed, batches[3:])
    for one, same in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, same)
        assert isinstance(resumed.state[same]["exp_avg_sq"], PerRow)


def test_what_is_written_to_a_detached_state_is_written_to_it() -> None:
    """As partitioners write, who detach first."""
    stored = PerRow.of(torch.zeros(3, 4), rows_of(3, 4, 0, 12))
    stored.detach().copy_(torch.ones(3, 4))
    assert torch.equal(stored * 1, torch.ones(3, 4))
    # A row that is all there is: as many values as it seems, not one that is read again and again.
    vector = PerRow.of(torch.ones(5), rows_of(1, 5, 0, 5))
    assert vector.dense().stride() == (1,)
    assert vector.dense().untyped_storage().nbytes() == 20


def test_a_checkpoint_is_loaded_into_an_engine_that_has_trained(tmp_path: Path) -> None:
    """Once its values were written into the memory of one of a vector's rows, and beyond it."""
    assert run_ranks(1, reloaded, str(tmp_path)) == [True]


def reloaded(folder: str) -> bool:
    from ds_testing.truth import start

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 300), nn.LayerNorm(300), nn.Linear(300, 1))
    engine = start(model, optimizer={"type": "AdamMini", "params": {"lr": 0.01}})
    batches = torch.randn(6, 4, 8)

    def train(some: torch.Tensor) -> list[torch.Tensor]:
        for batch in some:
            engine.backward(engine(batch).square().mean())
            engine.step()
        return [p.detach().clone() for p in engine.module.parameters()]

    train(batches[:2])
    engine.save_checkpoint(folder)
    wanted = train(batches[2:])
    for _ in range(3):
        engine.load_checkpoint(folder)
    found = train(batches[2:])
    engine.destroy()
    return all(map(torch.equal, found, wanted))
