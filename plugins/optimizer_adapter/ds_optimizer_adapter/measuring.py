"""Measuring an optimizer's grain: does it give the same when tensors are cut, or are alone?

A few steps on small tensors show whether an update looks beyond its element. What begins later (a
switch after a thousand steps) is not seen: measuring refutes a grain, and never proves one.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.optim import Optimizer

Make = Callable[[list[nn.Parameter]], "Optimizer"]

STEPS = 12
SHAPES = ((6, 5), (7,), (3, 2, 4))
SEED = 20_261
ROUNDING = 1e-6
"""What two runs may differ by, as a part of the largest change of a weight. Runs are in fp64; some
optimizers work out a factor in fp32."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What a measurement found.

    grain: the finest that it did not refute; None where it could not measure.
    why: what was seen, to go into a message.
    """

    grain: Literal["element", "tensor", "model"] | None
    why: str


def measure_grain(make: Make) -> Measured:
    """Run the optimizer that `make` gives on tensors that are whole, cut in two, and alone.

    The process's random numbers stay as they are.
    """
    weights, gradients = _draw()
    try:
        whole = _run(make, weights, gradients)
        again = _run(make, weights, gradients, seed=SEED + 1)
        halves = [
            _run(make, _half(weights, second), [_half(step, second) for step in gradients])
            for second in (False, True)
        ]
        alone = [
            *itertools.chain.from_iterable(
                _run(make, [weight], [[step[at]] for step in gradients])
                for at, weight in enumerate(weights)
            )
        ]
    except Exception as error:  # whatever an optimizer of others raises
        return Measured(
            None, f"it cannot be tried on small tensors: {type(error).__name__}: {error}"
        )
    moved = _distance(whole, weights)
    if not moved > 0:
        return Measured(None, f"it changes nothing in {STEPS} steps")
    if _distance(whole, again) > ROUNDING * moved:
        return Measured(None, "it draws random numbers")
    # Halves lie on two ranks in a run: neither sees the other.
    joined = [torch.cat(pair) for pair in zip(*halves, strict=True)]
    if (apart := _distance(whole, joined) / moved) <= ROUNDING:
        return Measured("element", f"tensors that are cut give the same in {STEPS} steps")
    seen = f"a tensor that is cut in two is updated otherwise, by {apart:.2g} of the largest update"
    if (apart := _distance(whole, alone) / moved) <= ROUNDING:
        return Measured("tensor", seen)
    return Measured(
        "model", f"a tensor alone is updated otherwise, by {apart:.2g} of the largest update"
    )


def _draw() -> tuple[list[Tensor], list[list[Tensor]]]:
    """Weights, and for each step their gradients, of sizes that change from step to step."""
    generator = torch.Generator().manual_seed(SEED)

    def normal(shape: Sequence[int]) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    weights = [normal(shape) for shape in SHAPES]
    gradients = [
        [normal(shape) * 0.1 * (1 + step % 3) for shape in SHAPES] for step in range(STEPS)
    ]
    return weights, gradients


def _half(tensors: Sequence[Tensor], second: bool) -> list[Tensor]:
    """One half of the elements of each, flat, as a partitioner cuts them."""
    flat = [tensor.reshape(-1) for tensor in tensors]
    return [x[x.numel() // 2 :] if second else x[: x.numel() // 2] for x in flat]


def _run(
    make: Make, weights: Sequence[Tensor], gradients: Sequence[Sequence[Tensor]], seed: int = SEED
) -> list[Tensor]:
    """The weights after all steps."""
    params = [nn.Parameter(weight.clone()) for weight in weights]
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings(), torch.enable_grad():
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        optimizer = make(params)
        for step in gradients:
            for param, gradient in zip(params, step, strict=True):
                param.grad = gradient.clone()
            optimizer.step()
    return [param.detach() for param in params]


def _distance(ones: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    """The largest difference of an element; infinity where one is not a number."""
    pairs: list[Any] = [
        (one.reshape(-1) - other.reshape(-1)).abs().max()
        for one, other in zip(ones, others, strict=True)
    ]
    return float(torch.stack(pairs).nan_to_num(nan=torch.inf).max())
