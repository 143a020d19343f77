"""The compiled kernel against the reference: every activation, biases or none, gates, uneven loads, threads."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from ds_moe import native
from ds_moe.dispatch import Plan, weigh_back
from ds_moe.ffn import ACTIVATIONS, FFN, ffn
from ds_moe.grouped import Groups
from torch import Tensor

SIZES = {"even": [6, 6, 6], "uneven": [0, 17, 1], "one": [0, 40, 0], "none": [0, 0, 0], "large": [1100, 0, 3]}


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_it_can_be_used_here() -> None:
    assert native.available() is None


def _weights(what: FFN, bias: bool, hidden: int, inner: int, out: int) -> dict[str, Tensor | None]:
    weights: dict[str, Tensor | None] = {}
    for name in (what.up, what.gate, what.down):
        if name is not None:
            rows, columns = (out, inner) if name == what.down else (inner, hidden)
            weights[f"{name}.weight"] = torch.randn(3, rows, columns, dtype=torch.float64) * 0.3
            weights[f"{name}.bias"] = torch.randn(3, rows, dtype=torch.float64) if bias else None
    return weights


@pytest.mark.parametrize("act", list(ACTIVATIONS))
@pytest.mark.parametrize("gated", [False, True])
def test_values_and_gradients(act: str, gated: bool) -> None:
    """As near to fp64 as fp32 gets, and the same in a second backward."""
    what = FFN("up", "down", act, "gate" if gated else None)
    for (case, sizes), bias, threads in itertools.product(SIZES.items(), (True, False), (1, 2, 3)):
        torch.manual_seed(0)
        torch.set_num_threads(threads)
        hidden, inner, out = (7, 37, 5) if case != "large" else (16, 48, 16)
        exact = {
            "x": torch.randn(sum(sizes), hidden, dtype=torch.float64) * 3,
            **_weights(what, bias, hidden, inner, out),
        }
        grad = torch.randn(sum(sizes), out, dtype=torch.float64)
        groups = Groups(torch.tensor(sizes))
        results = []
        for dtype, function in ((torch.float64, ffn), (torch.float32, native.ffn)):
            mine = {n: None if t is None else t.to(dtype).requires_grad_() for n, t in exact.items()}
            x = mine.pop("x")
            y = function(x, what, mine, groups)
            leaves = [t for t in (x, *mine.values()) if t is not None]
            grads = torch.autograd.grad(y, leaves, grad.to(dtype), retain_graph=True)
            again = torch.autograd.grad(y, leaves, grad.to(dtype))
            assert all(torch.equal(a, b) for a, b in zip(grads, again, strict=True))
            results.append([y.detach(), *grads])
        for wanted, got in zip(*results, strict=True):
            scale = max(float(wanted.abs().max()), 1e-3) if wanted.numel() else 1.0
            error = float((got.double() - wanted).abs().max()) / scale if wanted.numel() else 0.0
            assert error < 2e-6, f"{case}, bias {bias}, {threads} threads: off by {error:.1e}"


def test_the_whole_range_of_activations() -> None:
    """From far below 0, where results vanish, to far above, as exact as fp32 allows; no NaN from overflow."""
    x = torch.cat([torch.linspace(-12, 12, 100_001), torch.tensor([-1e38, -200.0, -90.0, 90.0, 200.0, 1e38])])[:, None]
    eye, groups = torch.ones(1, 1, 1), Groups(torch.tensor([len(x)]))
    weights: dict[str, Tensor | None] = {"u.weight": eye, "u.bias": None, "d.weight": eye, "d.bias": None}
    for act in ("relu", "silu", "gelu"):
        mine = x.clone().requires_grad_()
        y = native.ffn(mine, FFN("u", "d", act), weights, groups)
        y.sum().backward()
        exact = x.double().requires_grad_()
        wanted = ACTIVATIONS[act](exact)
        wanted.sum().backward()
        assert mine.grad is not None
        assert exact.grad is not None
        for got, want in ((y.detach(), wanted.detach()), (mine.grad, exact.grad)):
            assert bool(((got.double() - want).abs() <= 4e-7 * want.abs() + 5e-7).all()), act


def test_frozen_parts_get_no_gradient() -> None:
    what, groups = FFN("u", "d", "gelu"), Groups(torch.tensor([3, 2, 4]))
    torch.manual_seed(0)
    exact = {n: t.float() if t is not None else None for n, t in _weights(what, True, 6, 8, 6).items()}
    x = torch.randn(9, 6)
    for frozen in exact:
        weights = {n: None if t is None else t.clone().requires_grad_(n != frozen) for n, t in exact.items()}
        native.ffn(x, what, weights, groups).square().sum().backward()
        reference = {n: None if t is None else t.clone().requires_grad_(n != frozen) for n, t in exact.items()}
        ffn(x, what, reference, groups).square().sum().backward()
        for name, t in weights.items():
            other = reference[name]
            assert t is not None
            assert other is not None
            assert (t.grad is None) == (name == frozen)
            torch.testing.assert_close(t.grad, other.grad, rtol=1e-4, atol=1e-5)


def test_other_dtypes_are_refused() -> None:
    what = FFN("u", "d", "gelu")
    weights = _weights(what, False, 6, 8, 6)
    with pytest.raises(TypeError, match=r"tokens are torch\.float32, but experts have weights of torch\.float64"):
        native.ffn(torch.randn(9, 6), what, weights, Groups(torch.tensor([3, 2, 4])))


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("tokens", [0, 1, 7, 300])
@pytest.mark.parametrize("dropped", [False, True])
def test_the_way_back_of_weighted_sums(k: int, tokens: int, dropped: bool) -> None:
    generator = torch.Generator().manual_seed(tokens)
    experts = torch.randint(-1 if dropped else 0, 4, (tokens, k), generator=generator)
    plan = Plan.of(experts, 4)
    grad = torch.randn(19, tokens, generator=generator).t()  # in another order than rows
    y = torch.randn(len(plan.order), 19, generator=generator)
    weights = torch.rand(tokens * k, generator=generator)
    for found, expected in zip(
        native.weigh_back(grad, y, weights, plan), weigh_back(grad, y, weights, plan), strict=True
    ):
        torch.testing.assert_close(found, expected)
    with pytest.raises(TypeError, match=r"torch\.float64"):
        native.weigh_back(grad.double(), y, weights, plan)
