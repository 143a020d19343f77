"""Under `ds_zero.Init` a model never is in memory as a whole."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import ds_zero
import pytest
import torch
from ds_testing import run_ranks
from ds_zero.init.sharded_param import untracked
from torch import Tensor, nn

WIDE = 64
DEEP = 9


@untracked  # or looking would be touching
def live_bytes() -> int:
    """Bytes of every storage that a tensor object refers to."""
    gc.collect()
    storages = {}
    for item in gc.get_objects():
        if issubclass(type(item), torch.Tensor):
            storage = item.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


class Wide(nn.Module):
    def __init__(self, looked: Callable[[], None], attached: bool) -> None:
        super().__init__()
        made = []
        for _ in range(DEEP):
            made.append(nn.Linear(WIDE, WIDE, bias=False))
            looked()
        self.layers = nn.ModuleList(made)
        if attached:
            for layer in self.layers:
                nn.init.zeros_(layer.weight)
                looked()
        self.apply(self.start)
        looked()

    def start(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.normal_()

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


def settles(before: int, most: float) -> bool:
    """Whether no more than `most` bytes are left; the thread that sends may let go of its last
    tensor a bit later.
    """
    until = time.monotonic() + 10
    while live_bytes() - before > most and time.monotonic() < until:
        time.sleep(0.01)
    return live_bytes() - before <= most


def settled() -> int:
    """What is alive once it has stayed the same for a while: the thread that sends may still hold
    an earlier test's.
    """
    now = live_bytes()
    while True:
        time.sleep(0.2)
        later = live_bytes()
        if later == now:
            return now
        now = later


def measure() -> None:
    """Peaks in elements of one layer: while building, and while `initialize` takes the parts
    over."""
    from ds_zero.gather.unit import BucketUnit

    import ds_core
    from ds_core import comm

    layer = WIDE * WIDE * 4
    before = settled()
    peak = 0.0

    def look() -> None:
        nonlocal peak
        peak = max(peak, live_bytes() - before)

    with ds_zero.Init():
        model = Wide(look, attached=True)
        look()
    share = DEEP / comm.world_size()
    # The last finished, the one that begins, and what the thread that sends may still hold of the
    # one before.
    allowed = share + 3.1
    assert peak / layer <= allowed < DEEP, peak / layer
    assert settles(before, (share + 0.1) * layer)
    free = BucketUnit._free

    def seen(self: BucketUnit) -> None:
        look()  # while a unit is unsharded
        free(self)

    peak = 0
    BucketUnit._free = seen  # type: ignore[method-assign]
    try:
        engine, *_ = ds_core.initialize(
            model=model,
            config={
                "train_micro_batch_size_per_gpu": 1,
                "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
                "zero_optimization": {"stage": 3, "param_persistence_threshold": 0},
            },
        )
    finally:
        BucketUnit._free = free  # type: ignore[method-assign]
    assert 0 < peak / layer <= allowed, peak / layer
    assert settles(before, (share + 0.1) * layer)
    engine.destroy()


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_peak_memory_is_near_one_module_and_the_parts(world: int) -> None:
    run_ranks(world, measure)
