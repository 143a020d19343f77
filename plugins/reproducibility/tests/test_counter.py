"""Random bits by key and index: they are as likely and as independent as they should be, and a part
of a tensor has those of the whole.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from ds_reproducibility.counter import Grid, Key, below, bits, normal, number_of, uniform
from torch import Tensor

KEY = Key(601551704, 1844294696)
BITS = [[1958445404, 797448479, -1265234951], [344256564, -577305080, -1530844344]]
NUMBER = 1238551953797995072


def grid(*shape: int) -> Grid:
    return Grid([torch.arange(size) for size in shape])


def deviation(values: Tensor, mean: float, variance: float) -> float:
    """Of the mean from what is expected, in its own standard deviations."""
    return abs(values.double().mean().item() - mean) * math.sqrt(values.numel() / variance)


@pytest.mark.parametrize(
    "shape", [(300, 400), (8, 3, 64, 64), (1, 100_000), (100_000,), (20_000, 4)]
)
def test_bits_are_equally_likely(shape: tuple[int, ...]) -> None:
    found = bits(Key.of(1, "a.b"), grid(*shape))
    for place in range(8, 32):
        assert deviation((found >> place) & 1, 0.5, 0.25) < 5, place
    counts = torch.histc(uniform(Key.of(1, "a.b"), grid(*shape)), 256, 0, 1)
    expected = found.numel() / 256
    # chi squared of 255 degrees has mean 255 and standard deviation 22.6.
    assert ((counts - expected).square() / expected).sum() < 255 + 5 * 22.6


@pytest.mark.parametrize("p", [0.001, 0.1, 0.5, 0.9])
def test_rates(p: float) -> None:
    mask = below(Key.of(2), grid(400, 500), p)
    assert deviation(mask, p, p * (1 - p)) < 5
    # Of each row and of each column, too: neither is a copy of its neighbour.
    for sums, size in ((mask.double().mean(1), 500), (mask.double().mean(0), 400)):
        assert sums.var().item() * size / (p * (1 - p)) == pytest.approx(1, abs=0.5)
    assert not below(Key.of(2), grid(50), 0.0).any()
    assert below(Key.of(2), grid(50), 1.0).all()


def test_keys_and_neighbours_are_independent() -> None:
    keys = [
        Key.of(seed, step, name, call)
        for seed in (0, 1)
        for step in range(5)
        for name in ("a", "b")
        for call in (0, 1)
    ]
    keys += [keys[0].other(), keys[0].other().other()]
    found = torch.stack([uniform(key, grid(200, 200)).flatten() for key in keys])
    correlation = torch.corrcoef(found).fill_diagonal_(0).abs().max()
    # 861 pairs of 40,000: the largest is below 5 of 1/200.
    assert correlation < 5 / 200
    u = uniform(keys[0], grid(1000, 1000)).double() - 0.5
    for a, b in ((u[1:], u[:-1]), (u[:, 1:], u[:, :-1]), (u[:, 2:], u[:, :-2])):
        assert deviation(a * b * 12, 0, 1) < 5
    # Four corners share their rows and columns in pairs.
    corners = u[::2, ::2] * u[1::2, ::2] * u[::2, 1::2] * u[1::2, 1::2]
    assert deviation(corners * 144, 0, 1) < 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_distributions(dtype: torch.dtype) -> None:
    u = uniform(Key.of(3), grid(300, 300), dtype)
    assert u.dtype == dtype
    assert u.min() >= 0 and u.max() < 1
    assert deviation(u, 0.5, 1 / 12) < (5 if dtype.itemsize > 2 else 12)
    x = normal(Key.of(3), grid(300, 300), dtype).double()
    assert deviation(x, 0, 1) < 5
    assert deviation(x.square(), 1, 2) < 5
    assert deviation(x**4, 3, 96) < 5


def test_a_part_has_the_bits_of_the_whole() -> None:
    whole = bits(Key.of(4), grid(6, 20, 30))
    rows = torch.tensor([0, 3, 5])
    columns = torch.cat([torch.arange(2, 9), torch.arange(20, 29)])
    part = bits(Key.of(4), Grid([rows, torch.arange(7, 19), columns]))
    assert torch.equal(part, whole[rows][:, 7:19][..., columns])
    # Blocks of a large tensor end in the middle of it.
    large = bits(Key.of(4), grid(3, 300_000))
    assert torch.equal(
        large[1:2, 5:9], bits(Key.of(4), Grid([torch.tensor([1]), torch.arange(5, 9)]))
    )


def test_bits_stay_what_they_were() -> None:
    # A run goes on after an update of this package only if these do.
    assert Key.of(1234, 0, 0, "a", 0) == KEY
    assert bits(KEY, grid(2, 3)).tolist() == BITS
    assert number_of(1234, "x") == NUMBER


@pytest.mark.parametrize(
    ("first", "second"),
    [(("a", "b"), ("a, b",)), (("a", 1), ("a1",)), ((1, 11), (11, 1)), (("1",), (1,)), (("",), ())],
)
def test_names_do_not_run_together(first: Any, second: Any) -> None:
    assert Key.of(*first) != Key.of(*second)


def test_empty_and_single() -> None:
    assert bits(Key.of(0), grid(0, 5)).shape == (0, 5)
    assert bits(Key.of(0), grid(5, 0)).shape == (5, 0)
    assert bits(Key.of(0), Grid([])).shape == ()
