"""An interceptor of somebody else's counts the bytes of every step; see count_bytes.py beside this
file.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from ds_testing import InterceptorConformance, run_ranks

HERE = str(Path(__file__).parent)


def counted_steps() -> list[dict[str, float]]:
    import torch

    import ds_core
    from ds_core import comm
    from ds_core.entries import Event

    sys.path.insert(0, HERE)

    class Kept:
        name = "kept"

        def __init__(self) -> None:
            self.events: list[Event] = []

        def write_events(self, events: Any) -> None:
            self.events += events

        def flush(self) -> None: ...
        def close(self) -> None: ...

    model = torch.nn.Linear(4, 2, bias=False)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "plugins": {"load": ["count_bytes=count_bytes"]},
        "count_bytes": {"ops": ["all_reduce"]},
    }
    engine, *_ = ds_core.initialize(model=model, config=config)
    kept = Kept()
    engine.monitor.monitors.append(kept)
    steps = []
    for _ in range(2):
        engine.backward(engine(torch.ones(1, 4)).sum())
        engine.step()
        steps.append({e.name: e.value for e in kept.events if e.name.startswith("Comm/")})
        kept.events.clear()
    engine.destroy()
    assert comm.interceptors() == ()
    return steps


def test_bytes_of_every_step_are_metrics() -> None:
    for steps in run_ranks(2, counted_steps):
        # 8 gradients and the flag of the parameter, in fp32
        assert steps[-1] == {"Comm/all_reduce_bytes": 36.0}


class TestCountBytes(InterceptorConformance):
    config = {"count_bytes": {}}  # noqa: RUF012
    load = ("count_bytes=count_bytes",)
