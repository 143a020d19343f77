"""A process that starts and stops engines again and again, as a notebook or a sweep does, stays as
it was.
"""

from __future__ import annotations

import gc
import math
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ds_testing import run_ranks
from ds_testing.processes import free_port
from torch import nn

import ds_core
from ds_core import comm

WARM = 2
CONFIGS: dict[str, dict[str, Any]] = {
    "default": {},
    "guard": {"comms_guard": {"enabled": True}},
    "plugins": {
        "zero_optimization": {"stage": 2},
        "gradient_clipping": 1.0,
        "activation_checkpointing": {},
        "steps_per_print": 1,
        "comms_logger": {"enabled": True},
        "flops_profiler": {"enabled": True, "profile_step": 1},
        "scheduler": {"type": "WarmupLR"},
    },
}


def held(at_most: float = math.inf) -> tuple[int, int, int]:
    """Descriptors, threads and KiB of memory of this process, once what was stopped has ended
    beside us.

    at_most: so many descriptors are expected.
    """
    until = time.monotonic() + 5.0
    while True:
        gc.collect()  # takes long in a worker that has run many tests
        descriptors = len(os.listdir("/proc/self/fd"))
        threads = threading.active_count()
        if (threads == 1 and descriptors <= at_most) or time.monotonic() > until:
            break
        time.sleep(0.5)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return descriptors, threads, pages * os.sysconf("SC_PAGE_SIZE") // 1024


def cycle(config: dict[str, Any], port: int) -> None:
    os.environ["MASTER_PORT"] = str(port)
    comm.init_distributed(config=config, verbose=False)
    engine, *_ = ds_core.initialize(model=nn.Linear(4, 4), config=config)
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
    engine.destroy()
    ds_core.reset()
    dist.barrier()  # rank 0's store must not end while another rank uses it
    dist.destroy_process_group()


def run_cycles(config: dict[str, Any], ports: list[int]) -> list[tuple[int, int, int]]:
    """What this process holds after the first cycles, and after all."""
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD"}, **config}
    dist.destroy_process_group()
    for port in ports[:WARM]:
        cycle(config, port)
    before = held()
    for port in ports[WARM:]:
        cycle(config, port)
    return [before, held(before[0])]


@pytest.mark.parametrize(
    ("kind", "cycles"),
    [("default", 4), *(pytest.param(kind, 100, marks=pytest.mark.slow) for kind in CONFIGS)],
)
def test_cycles_leave_threads_descriptors_and_memory_as_they_were(kind: str, cycles: int) -> None:
    ports = [free_port() for _ in range(WARM + cycles)]
    for before, after in run_ranks(2, run_cycles, CONFIGS[kind], ports):
        # Earlier tests of this worker may have left watchers of the pool's own groups; cycles add
        # none.
        assert after[0] <= before[0] and after[1] <= before[1], (before, after)
        assert after[2] - before[2] < 4096, (before, after)
