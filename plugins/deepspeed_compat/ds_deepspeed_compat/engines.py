"""Classes and types by which scripts tell engines apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from ds_core.engine import Engine

__all__ = ["DeepSpeedOptimizerCallable", "DeepSpeedSchedulerCallable", "PipelineEngine"]

DeepSpeedOptimizerCallable = Callable[[Any], Optimizer]
DeepSpeedSchedulerCallable = Callable[[Optimizer], Any]


class _OfPipelines(type(Engine)):  # type: ignore[misc]
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, Engine) and not instance.runner.manual


class PipelineEngine(Engine, metaclass=_OfPipelines):
    """The type of engines that run whole batches only: their model is a pipeline. `initialize` makes them."""
