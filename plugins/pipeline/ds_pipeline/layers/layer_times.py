"""How long each layer takes, for ``partition_method="profile"``."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ds_core import comm
from ds_core.accelerator import get_accelerator
from ds_core.nested import map_leaves
from ds_pipeline.micro_batches import tensors_in, to_device

REPEATS = 3

Made = tuple[Callable[[Any], Any], nn.Module | None]


def measure(makers: Sequence[Callable[[], Made]], example: Any) -> list[float]:
    """Seconds of forward and backward of each layer on the accelerator, the least of several runs.

    makers: each builds one layer, and returns its callable and the module behind it, if any. Layers
        are built and moved to the device one at a time.
    example: the first layer's input.
    """
    accelerator = get_accelerator()
    device = accelerator.device(accelerator.local_index(comm.local_rank()))
    value = to_device(example, device)
    times = []
    with torch.random.fork_rng(), torch.enable_grad():
        for make in makers:
            given = value
            (call, module) = make()
            if module is not None:
                module.to(device)
            best = float("inf")
            for _ in range(REPEATS + 1):  # the first is not like the others
                inputs = map_leaves(_as_leaf, given)
                accelerator.synchronize()
                start = time.perf_counter()
                value = call(inputs)
                outputs = [t for t in tensors_in(value) if t.requires_grad]
                if outputs:
                    torch.autograd.backward(outputs, [torch.ones_like(t) for t in outputs])
                accelerator.synchronize()
                best = min(best, time.perf_counter() - start)
            times.append(best)
    return times


def _as_leaf(value: Any) -> Any:
    """A tensor without the graph behind it, whose gradient is computed where it can have one."""
    if not isinstance(value, Tensor):
        return value
    leaf = value.detach()
    return leaf.requires_grad_().clone() if leaf.is_floating_point() else leaf
