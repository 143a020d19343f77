"""How long each layer takes, for ``partition_method="profile"``."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["measure"]

REPEATS = 3


def measure(makers: Sequence[Callable[[], Any]], example: Any) -> list[float]:
    """Seconds of forward and backward of each layer, the least of several runs.

    makers: give the layers, one of which exists at a time. example: the first layer's input.
    """
    value, times = example, []
    with torch.random.fork_rng(), torch.enable_grad():
        for make in makers:
            layer, given = make(), value
            best = float("inf")
            for _ in range(REPEATS + 1):  # the first is not like the others
                start = time.perf_counter()
                value = layer(_leaves(given))
                outputs = [t for t in _tensors(value) if t.requires_grad]
                if outputs:
                    torch.autograd.backward(outputs, [torch.ones_like(t) for t in outputs])
                best = min(best, time.perf_counter() - start)
            for param in layer.parameters() if hasattr(layer, "parameters") else ():
                param.grad = None
            times.append(best)
    return times


def _tensors(value: Any) -> list[Tensor]:
    return [t for t in (value if isinstance(value, tuple) else (value,)) if isinstance(t, Tensor)]


def _leaves(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_leaves(v) for v in value)
    if not isinstance(value, Tensor):
        return value
    leaf = value.detach()
    return leaf.requires_grad_().clone() if leaf.is_floating_point() else leaf
