"""Records for tests, written as the recorder writes them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def write_record() -> Callable[..., Path]:
    """``write_record(folder, steps)``: a record of two ranks."""
    return _write_record


def _write_record(
    folder: Path,
    steps: int = 20,
    *,
    world: int = 2,
    name: str = "",
    last: str = "finished",
    **more: Any,
) -> Path:
    """A record as the recorder writes it."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(world):
        config = {"optimizer": {"type": name or "AdamW", "params": {"lr": 0.1}}, **more}
        start = {
            "rank": rank,
            "world_size": world,
            "device": "cpu",
            "config": config,
            "versions": {"torch": "2.13.0"},
        }
        end = {"state": last, **({"error": f"ValueError: {name}"} if last == "failed" else {})}
        rows: list[dict[str, Any]] = [
            {"kind": "start", "time": 1e9, "format": 1, "total_steps": 50, **start},
            *(_step(number, name) for number in range(1, steps + 1)),
            {
                "kind": "memory",
                "time": 1e9,
                "step": steps,
                "allocated": 2**30,
                "peak": (rank + 2) * 2**30,
            },
            {"kind": "end", "time": 1e9 + 9, **end},
        ]
        (folder / f"rank{rank}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def _step(number: int, name: str) -> dict[str, Any]:
    """The row of one step; `name` is that of a metric of the run's own."""
    return {
        "kind": "step",
        "time": 1e9 + number * 0.1,
        "step": number,
        "metrics": {
            "loss": 4 / number,
            "lr": 0.1,
            "grad_norm": 1.0,
            "samples": 8.0 * number,
            f"mine/{name}": float(number),
            "Train/Samples/tokens_per_second": 64.0,
        },
        "host_ms": {
            "forward": 20.0,
            "backward": 60.0,
            "backward_inner": 40.0,
            "backward_allreduce": 15.0,
            "step": 10.0,
        },
    }
