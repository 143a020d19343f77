"""Every function, forwards and backwards, against the same done by one process that has all ranks'
tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ds_testing import run_ranks
from torch import Tensor

from ds_core import comm

SHAPE = {"even": (2, 12, 6), "uneven": (2, 7, 5)}
UNEVEN = {2: {7: [4, 3], 5: [0, 5]}, 3: {7: [3, 0, 4], 5: [2, 2, 1]}}


def tensor(seed: int, shape: Any, grad: bool = False) -> Tensor:
    made = torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return made.requires_grad_(grad)


def cases(
    kind: str, world: int
) -> dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]], Any]]:
    """By name: the function, the shapes of the ranks' inputs, and (ranks' inputs -> ranks'
    outputs).
    """
    import ds_comm_autograd as dc

    batch, sequence, heads = SHAPE[kind]
    cut, join = (UNEVEN[world][n] if kind == "uneven" else None for n in (sequence, heads))
    long = cut or [sequence // world] * world
    wide = join or [heads // world] * world
    whole = [SHAPE[kind]] * world
    parts = [(batch, n, heads) for n in long]

    def joined(xs: list[Tensor]) -> list[Tensor]:
        return [torch.cat(xs, 1)] * world

    def own(xs: list[Tensor]) -> list[Tensor]:
        return [x.split(long, 1)[rank] for rank, x in enumerate(xs)]

    def exchanged(xs: list[Tensor]) -> list[Tensor]:
        return [torch.cat([x.split(wide, 2)[rank] for x in xs], 1) for rank in range(world)]

    return {
        "copy_to": (dc.copy_to, whole, lambda xs: xs),
        "reduce_from": (dc.reduce_from, whole, lambda xs: [sum(xs)] * world),
        "mean": (dc.mean, whole, lambda xs: [sum(xs) / world] * world),
        "gather": (lambda x, g: dc.gather(x, g, 1, cut), parts, joined),
        "gather_to": (lambda x, g: dc.gather_to(x, g, -2, cut), parts, joined),
        "split": (lambda x, g: dc.split(x, g, 1, cut), whole, own),
        "reduce_scatter": (
            lambda x, g: dc.reduce_scatter(x, g, 1, cut),
            whole,
            lambda xs: own([sum(xs)] * world),
        ),
        "all_to_all": (lambda x, g: dc.all_to_all(x, g, 2, 1, join, cut), parts, exchanged),
    }


ALIKE = {
    "copy_to": lambda grads, rank: sum(grads),
    "reduce_from": lambda grads, rank: grads[rank],
    "mean": lambda grads, rank: grads[rank],
}
"""Gradients that are not those of the forward as it is: there all ranks go on alike, or have begun
alike.
"""


def errors(world: int, kind: str, compiled: bool) -> dict[str, float]:
    off = {}
    rank = comm.rank()
    for name, (function, shapes, truth) in cases(kind, world).items():
        inputs = [tensor(i, shape, True) for i, shape in enumerate(shapes)]
        wanted = truth(inputs)
        grads = [tensor(10 + i, out.shape) for i, out in enumerate(wanted)]
        mine = inputs[rank].detach().clone().requires_grad_()
        run = (
            torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=False)
            if compiled
            else function
        )
        got = run(mine, None)
        got.backward(grads[rank])
        if name in ALIKE:
            grad = ALIKE[name](grads, rank)
        elif name == "gather":
            grad = grads[rank].split([s[1] for s in shapes], 1)[rank]
        elif name == "split":
            grad = torch.cat(grads, 1)
        else:
            grad = torch.autograd.grad(wanted, inputs, grads)[rank]
        assert got.shape == wanted[rank].shape and got.is_contiguous()
        off[name] = max(_most(got - wanted[rank]), _most(mine.grad - grad))
        torch.compiler.reset() if compiled else None
    return off


def _most(difference: Tensor) -> float:
    return float(difference.abs().max()) if difference.numel() else 0.0


@pytest.mark.parametrize("kind", SHAPE)
@pytest.mark.parametrize("world", [2, 3])
def test_values_and_gradients(world: int, kind: str) -> None:
    for off in run_ranks(world, errors, world, kind, False):
        assert len(off) == 8
        assert max(off.values()) < 1e-14, off


@pytest.mark.fast_cases("uneven")
@pytest.mark.parametrize("kind", SHAPE)
def test_compiled_in_one_graph(kind: str) -> None:
    for off in run_ranks(2, errors, 2, kind, True):
        assert max(off.values()) < 1e-14, off


def alone() -> list[bool]:
    import ds_comm_autograd as dc

    x = torch.ones(2, 3)
    return [
        dc.copy_to(x, comm.ALONE) is x,
        dc.gather(x, None, 1) is x,
        dc.all_to_all(x, comm.ALONE, 0, 1) is x,
    ]


def test_a_group_of_one_rank_costs_nothing() -> None:
    assert all(alone())
    assert all(run_ranks(1, alone)[0])


def wrong() -> list[str]:
    import ds_comm_autograd as dc

    found = []
    x = torch.ones(3, 4)
    calls: list[Callable[[], Tensor]] = [
        lambda: dc.split(x, None, 0),
        lambda: dc.gather(x, None, 0, [1, 1]),
        lambda: dc.reduce_scatter(x, None, 0, [1, 1, 1]),
        lambda: dc.all_to_all(x, None, 1, -1),
        lambda: dc.split(x, None, 2),
    ]
    for call in calls:
        with pytest.raises((ValueError, IndexError)) as error:
            call()
        found.append(str(error.value))
    return found


def test_wrong_sizes_are_errors_before_anything_is_sent() -> None:
    texts = run_ranks(2, wrong)[0]
    assert texts[0] == "split: a length of 3 does not divide over 2 ranks; give sizes"
    assert texts[1] == "gather: sizes [1, 1] for 2 ranks, where this rank's is 3; give one per rank"
    assert (
        texts[2]
        == "reduce_scatter: sizes [1, 1, 1] for 2 ranks, where the whole is 3; give one per rank"
    )
    assert "both dimension 1" in texts[3] and "dimension 2" in texts[4]


def second_order() -> bool:
    """The gradient of a gradient: of a column- and a row-parallel layer in a row, with respect to
    the input.
    """
    import ds_comm_autograd as dc

    rank = comm.rank()
    x = tensor(0, (3, 4), True)
    up = tensor(1, (4, 6), True)
    down = tensor(2, (6, 4), True)

    def squares(y: Tensor) -> Tensor:
        (grad,) = torch.autograd.grad(y.pow(3).sum(), x, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), x)[0]

    wanted = squares((x @ up).tanh() @ down)
    mine = slice(3 * rank, 3 * rank + 3)
    got = squares(dc.reduce_from((dc.copy_to(x, None) @ up[:, mine]).tanh() @ down[mine], None))
    return torch.allclose(got, wanted, rtol=0, atol=1e-11)


def test_gradients_have_gradients() -> None:
    assert all(run_ranks(2, second_order))
