"""Optimizers with states of whole matrices: the papers' equations, and where states are."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import ds_optimizers as ours
import matrix_papers as papers
import pytest
import torch
from ds_testing.truth import start
from test_optimizers_references import RATES, by_hand, check, trained
from torch import Tensor, nn

from ds_core.errors import UsageError

KINDS: dict[str, tuple[dict[str, Any], Callable[..., None], tuple[float, float]]] = {
    "SOAP": (
        {"precondition_frequency": 3, "max_precond_dim": 8},
        functools.partial(papers.soap, every=3, longest=8),
        (0.95, 0.95),
    ),
    "Shampoo": (
        {"precondition_frequency": 3, "max_precond_dim": 8, "damping": 1e-6},
        functools.partial(papers.shampoo, every=3, longest=8, graft="adam"),
        (0.9, 0.999),
    ),
    "Shampoo sgd": (
        {"precondition_frequency": 1, "damping": 1e-6, "grafting": "sgd"},
        functools.partial(papers.shampoo, every=1, longest=99, graft="sgd"),
        (0.9, 0.999),
    ),
    "Shampoo none": (
        {"precondition_frequency": 1, "damping": 1e-6, "grafting": "none"},
        functools.partial(papers.shampoo, every=1, longest=99, graft="none"),
        (0.9, 0.999),
    ),
    "Dion": ({"rank_fraction": 0.4}, functools.partial(papers.dion, fraction=0.4), (0.9, 0.95)),
    "GaLore": (
        {"rank": 2, "update_proj_gap": 4},
        functools.partial(papers.galore, rank=2, every=4),
        (0.9, 0.999),
    ),
}
NAMES = ("SOAP", "Shampoo", "Dion", "GaLore")


@pytest.mark.parametrize("kind", list(KINDS))
def test_it_equals_the_paper(kind: str) -> None:
    params, paper, (beta1, beta2) = KINDS[kind]

    def make(given: Any) -> torch.optim.Optimizer:
        rows = [{**g, "matrices": first} for g, first in zip(given, (True, False), strict=True)]
        return getattr(ours, kind.split()[0])(rows, **params)  # type: ignore[no-any-return]

    def update(p: Tensor, g: Tensor, s: dict[str, Any], *, lr: float, wd: float) -> None:
        if lr == RATES[0]:
            paper(p, g, s, lr=lr, wd=wd)
        else:
            papers.adam(p, g, s, lr=lr, wd=wd, beta1=beta1, beta2=beta2)

    shapes = ((5, 3), (3, 8), (4, 4), (2, 3, 2, 2), (9, 2), (7,), (4, 6), (), (3,), (0, 3))
    # In fp32 directions that gradients have not had yet are chosen to 1e-3: rounding over the shift.
    for dtype, tolerance, steps in ((torch.float64, 1e-8, 60), (torch.float32, 1e-2, 10)):
        check(
            trained(make, dtype, steps, shapes),
            by_hand(update, dtype, steps, shapes),
            tolerance,
        )


@pytest.mark.parametrize("kind", NAMES)
def test_vectors_are_no_matrices(kind: str) -> None:
    optimizer = getattr(ours, kind)([torch.nn.Parameter(torch.ones(3))])
    optimizer.param_groups[0]["params"][0].grad = torch.ones(3)
    with pytest.raises(UsageError, match="group of matrices"):
        optimizer.step()


@pytest.mark.parametrize("kind", NAMES)
def test_a_copy_goes_on_by_itself(kind: str) -> None:
    optimizer = getattr(ours, kind)([nn.Parameter(torch.ones(3, 4))])
    makes = torch.Generator().manual_seed(0)
    grads = [torch.randn(3, 4, generator=makes) for _ in range(5)]
    for each in (optimizer, optimizer):
        each.param_groups[0]["params"][0].grad = grads[0]
        each.step()
    copied = copy.deepcopy(optimizer)
    for each in (optimizer, copied):
        for grad in grads[1:]:
            each.param_groups[0]["params"][0].grad = grad
            each.step()
    assert torch.equal(copied.param_groups[0]["params"][0], optimizer.param_groups[0]["params"][0])


@pytest.mark.parametrize("kind", NAMES)
def test_offload_states_takes_them_too(kind: str) -> None:
    def engine_of() -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4))
        zero = {"stage": 3}
        return start(model, optimizer={"type": kind, "params": {}}, zero_optimization=zero)

    def step(engine: Any, number: int) -> None:
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(number))
        engine.backward(engine(x).square().mean())
        engine.step()

    still = engine_of()
    moving = engine_of()
    for number in range(4):
        step(still, number)
        step(moving, number)
        owned = [t for p in moving.optimizer.owned_states() for t in (p.tensor,)]
        assert len(owned) > 4
        moving.offload_states(include=["optim_states"])
        assert all(t.untyped_storage().nbytes() == 0 for t in owned)
        moving.reload_states()
        again = [p.tensor for p in still.optimizer.owned_states()]
        assert all(map(torch.equal, owned, again))


def test_directions_without_gradient_are_not_those_of_rounding() -> None:
    """An expert with one token has a gradient of rank one, and later others."""
    import ds_optimizers

    generator = torch.Generator().manual_seed(0)
    draws = [torch.randn(6, 1, generator=generator).double() for _ in range(8)]
    rounding = 1e-17 * torch.randn(6, 9, generator=generator).double()

    def train(off: float) -> torch.Tensor:
        weight = torch.nn.Parameter(torch.ones(6, 9).double())
        optimizer = ds_optimizers.GaLore([weight], lr=0.1, rank=3, update_proj_gap=2)
        for draw in draws:
            weight.grad = draw @ draw[:1].expand(1, 9) + off * rounding
            weight.grad = weight.grad + draw @ (draw.t() @ torch.ones(6, 9).double()) / 9
            optimizer.step()
        return weight.detach()

    assert torch.allclose(train(0.0), train(1.0), rtol=0, atol=1e-9)
