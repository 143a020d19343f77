"""The compiled kernel against the reference: every activation, biases or none, gates, uneven loads,
threads.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import torch
from ds_kernel_kit.command import app
from ds_kernel_kit.comparisons import check
from ds_moe.ffn import ACTIVATIONS, FFN, ffn
from ds_moe.kernels import compiled
from ds_moe.kernels.checks import random_weights
from ds_moe.kernels.grouped import Groups
from ds_moe.plugin import ds_kernels
from ds_testing import KernelConformance
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_it_can_be_used_here() -> None:
    assert compiled.available() is None


class TestConformance(KernelConformance):
    plugin = "ds_moe.plugin"


@pytest.mark.parametrize("threads", [1, 3])
def test_any_number_of_threads(threads: int) -> None:
    torch.set_num_threads(threads)
    for entry in ds_kernels():
        if entry.provider == "cpp":
            check(entry)


def test_the_whole_range_of_activations() -> None:
    """From far below 0, where results vanish, to far above, as exact as fp32 allows; no NaN from
    overflow.
    """
    x = torch.cat(
        [torch.linspace(-12, 12, 100_001), torch.tensor([-1e38, -200.0, -90.0, 90.0, 200.0, 1e38])]
    )[:, None]
    eye = torch.ones(1, 1, 1)
    groups = Groups(torch.tensor([len(x)]))
    weights: dict[str, Tensor | None] = {
        "u.weight": eye,
        "u.bias": None,
        "d.weight": eye,
        "d.bias": None,
    }
    for act in ("relu", "silu", "gelu"):
        mine = x.clone().requires_grad_()
        y = compiled.ffn(mine, FFN("u", "d", act), weights, groups)
        y.sum().backward()
        exact = x.double().requires_grad_()
        wanted = ACTIVATIONS[act](exact)
        wanted.sum().backward()
        assert mine.grad is not None
        assert exact.grad is not None
        for got, want in ((y.detach(), wanted.detach()), (mine.grad, exact.grad)):
            assert bool(((got.double() - want).abs() <= 4e-7 * want.abs() + 5e-7).all()), act


def test_frozen_parts_get_no_gradient() -> None:
    what = FFN("u", "d", "gelu")
    groups = Groups(torch.tensor([3, 2, 4]))
    torch.manual_seed(0)
    exact = {
        n: t.float() if t is not None else None
        for n, t in random_weights(what, True, (6, 8, 6)).items()
    }
    x = torch.randn(9, 6)
    for frozen in exact:
        weights = {
            n: None if t is None else t.clone().requires_grad_(n != frozen)
            for n, t in exact.items()
        }
        compiled.ffn(x, what, weights, groups).square().sum().backward()
        reference = {
            n: None if t is None else t.clone().requires_grad_(n != frozen)
            for n, t in exact.items()
        }
        ffn(x, what, reference, groups).square().sum().backward()
        for name, t in weights.items():
            other = reference[name]
            assert t is not None
            assert other is not None
            assert (t.grad is None) == (name == frozen)
            torch.testing.assert_close(t.grad, other.grad, rtol=1e-4, atol=1e-5)


def test_other_dtypes_are_refused() -> None:
    what = FFN("u", "d", "gelu")
    weights = random_weights(what, False, (6, 8, 6))
    with pytest.raises(
        TypeError, match=r"tokens are torch\.float32, but experts have weights of torch\.float64"
    ):
        compiled.ffn(torch.randn(9, 6), what, weights, Groups(torch.tensor([3, 2, 4])))


def test_the_way_back_takes_one_dtype() -> None:
    where = compiled.plan(torch.tensor([[0], [1]]), 2)
    with pytest.raises(TypeError, match=r"its gradient torch\.float64"):
        compiled.weigh_back(torch.ones(2, 3).double(), torch.ones(2, 3), torch.ones(2), where)
    with pytest.raises(
        TypeError, match=r"output is torch\.float32, its weights are torch\.float64"
    ):
        compiled.sums(torch.ones(2, 3), where, torch.ones(2).double())


@pytest.mark.parametrize("wrong", [2, -2, 10**12])
def test_an_expert_that_there_is_not_is_refused(wrong: int) -> None:
    with pytest.raises(
        ValueError, match=f"experts are 0 to 1, or -1 for none, but here they are .*{wrong}"
    ):
        compiled.plan(torch.tensor([[0, 1], [wrong, 1]]), 2)


def test_dscore_ops_knows_them_without_a_config() -> None:
    done = CliRunner().invoke(app, ["list", "--json"])
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)
    ops = ("expert_ffn", "expert_plan", "expert_sums", "expert_weigh_back")
    assert {(op, "cpp") for op in ops} <= {(r["operation"], r["provider"]) for r in rows}


@pytest.mark.parametrize("gate", [None, "g"])
@pytest.mark.parametrize("wants_x", [True, False])
def test_its_products_are_counted_as_the_references(gate: str | None, wants_x: bool) -> None:
    """By torch's counter, in forward and backward; experts get 5, 0 and 2 rows."""
    groups = Groups(torch.tensor([5, 0, 2]))
    what = FFN("u", "d", "silu", gate)
    weights: dict[str, Tensor | None] = {f"{n}.bias": None for n in "ugd"}
    weights |= {
        f"{n}.weight": torch.ones(3, *shape, requires_grad=True)
        for n, shape in (("u", (6, 4)), ("d", (4, 6)))
    }
    weights["g.weight"] = torch.ones(3, 6, 4, requires_grad=True)
    found = []
    for function in (compiled.ffn, ffn):
        x = torch.ones(7, 4, requires_grad=wants_x)
        with FlopCounterMode(display=False) as forward:
            y = function(x, what, weights, groups)
        with FlopCounterMode(display=False) as backward:
            y.sum().backward()
        found.append((forward.get_total_flops(), backward.get_total_flops()))
    assert found[0] == found[1]
    assert found[0][0] == 2 * 7 * 24 * (2 if gate is None else 3)
