"""Engines and batches of the tests of a running pipeline."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))

from ds_testing.truth import start
from pipe_models import MICRO, Plain, batch

SCHEDULES = [("1f1b", 1), ("zero_bubble", 1), ("interleaved", 2)]


def pipeline_engine(model: nn.Module, gas: int = 2, schedule: str = "auto", **more: Any) -> Any:
    """An engine of a pipeline, or of the plain module. more: for `start`."""
    sections = {} if isinstance(model, Plain) else {"pipeline": {"schedule": schedule}}
    adamw = {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.01}}
    return start(
        model, micro=MICRO, gas=gas, **{"clip": 0.4, "optimizer": adamw, **sections, **more}
    )


def batches(count: int, step: int = 0, index: int = 0, length: int = 5) -> Iterator[Any]:
    return iter([batch(step, m, index, length) for m in range(count)])


def plain_loss(truth: Plain, count: int, step: int = 0, length: int = 5) -> float:
    return sum(truth(*b).item() for b in batches(count, step, length=length)) / count


def close(ours: Any, theirs: Any) -> bool:
    a, b = (
        x.double() if isinstance(x, Tensor) else torch.tensor(x, dtype=torch.float64)
        for x in (ours, theirs)
    )
    return bool(torch.allclose(a, b, rtol=1e-12, atol=1e-14))


def squares(outputs: Tensor, labels: Tensor) -> Tensor:
    return (outputs - labels).square().mean()


def numbers(step: int, micro: int, rows: int = 2) -> tuple[Tensor, Tensor]:
    x = torch.randn(
        2, rows, 6, generator=torch.Generator().manual_seed(100 * step + micro), dtype=torch.float64
    )
    return x[0], x[1]
