"""What a metric may be, and its state on one rank: an exact sum and a count, or an object's own.

Sums are exact (Shewchuk's partial sums, as in `math.fsum`), so they do not depend on how samples
are divided over batches and ranks.
"""

from __future__ import annotations

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ds_core.errors import UsageError

if TYPE_CHECKING:
    from ds_core.engine import Engine

Metric = Any
"""A function of (outputs, batch), an object with ``update`` and ``compute``, or a pair of such an
object and a function that gives the arguments of ``update``.
"""


class Score(ABC):
    """One metric on this rank."""

    @abstractmethod
    def add(self, outputs: Any, batch: Any) -> None:
        """Take one batch into account."""

    @abstractmethod
    def state(self) -> list[float]:
        """The count over all batches, then parts of the sum."""


class Mean(Score):
    """A mean of what a function gives."""

    def __init__(self, name: str, function: Callable[[Any, Any], Any]) -> None:
        self._name = name
        self._function = function
        self._sum = ExactSum()
        self._count = 0.0

    def add(self, outputs: Any, batch: Any) -> None:
        """See `Score`."""
        values, count = self._parts(self._function(outputs, batch))
        for value in values:
            self._sum.add(value)
        self._count += count

    def state(self) -> list[float]:
        """See `Score`."""
        return [self._count, *self._sum.parts]

    def _parts(self, given: Any) -> tuple[list[float], float]:
        if isinstance(given, tuple) and len(given) == 2:
            total, count = (_number(item) for item in given)
            if total is not None and count is not None and count >= 0:
                return [total], count
        elif isinstance(given, Tensor) and given.dim() > 0:
            return given.detach().double().flatten().tolist(), given.numel()
        shown = (
            f"a tensor of shape {tuple(given.shape)}"
            if isinstance(given, Tensor)
            else f"a {type(given).__name__}"
        )
        raise UsageError(
            f"metric {self._name!r} returned {shown}; it must return a tensor with one value per "
            "sample, or the pair (sum, count), such as (outputs.loss * n, n)"
        )


class Stateful(Score):
    """A torchmetrics object, which exchanges its state by itself."""

    def __init__(self, name: str, metric: Any, select: Any, engine: Engine) -> None:
        self._name = name
        self._select = select
        self._engine = engine
        mesh = engine.ctx.mesh
        if mesh.size("batch") > 1 and not hasattr(metric, "process_group"):
            raise UsageError(
                f"metric {name!r}, a {type(metric).__name__}, has no process_group, so its state "
                "cannot be combined over ranks; give a torchmetrics object, or a function that "
                "returns (sum, count)"
            )
        if hasattr(metric, "reset"):
            metric.reset()
        self._metric = metric.to(engine.device) if hasattr(metric, "to") else metric

    def add(self, outputs: Any, batch: Any) -> None:
        """See `Score`."""
        given = (outputs, batch) if self._select is None else self._select(outputs, batch)
        if isinstance(given, Mapping):
            self._metric.update(**given)
        else:
            self._metric.update(*given if isinstance(given, (tuple, list)) else (given,))

    def state(self) -> list[float]:
        """The value over all ranks, as if of one sample."""
        with _combining(self._metric, self._engine):
            value = _number(self._metric.compute())
        if value is None:
            raise UsageError(f"metric {self._name!r}: compute() must return one number")
        return [1.0, value]


class ExactSum:
    """A sum of floats without rounding, as parts that do not overlap."""

    def __init__(self) -> None:
        self.parts: list[float] = []

    def add(self, value: float) -> None:
        """Add one number, and all that rounding would lose."""
        if not math.isfinite(value + sum(self.parts)):
            self.parts = [value + sum(self.parts)]
            return
        kept = []
        for part in self.parts:
            big, small = (value, part) if abs(value) >= abs(part) else (part, value)
            value = big + small
            lost = small - (value - big)
            if lost:
                kept.append(lost)
        self.parts = [*kept, value]


def score_of(name: str, metric: Metric, engine: Engine) -> Score:
    """The state of a metric; UsageError for what is none."""
    select = None
    if isinstance(metric, tuple) and len(metric) == 2 and callable(metric[1]):
        metric, select = metric
    # An object of torchmetrics can be called too.
    if callable(getattr(metric, "update", None)) and callable(getattr(metric, "compute", None)):
        return Stateful(name, metric, select, engine)
    if callable(metric) and select is None and not isinstance(metric, type):
        return Mean(name, metric)
    raise UsageError(
        f"metric {name!r} is a {type(metric).__name__}; it must be a function (outputs, batch), or "
        "an object with update and compute"
    )


def totals(states: Sequence[Sequence[float]]) -> float:
    """The mean over all ranks' samples; NaN where nothing was counted."""
    count = math.fsum(state[0] for state in states)
    parts = [part for state in states for part in state[1:]]
    # fsum raises for infinities of both signs, and for sums that are too large.
    total = math.fsum(parts) if all(map(math.isfinite, parts)) else sum(parts)
    return total / count if count else math.nan


@contextlib.contextmanager
def _combining(metric: Any, engine: Engine) -> Iterator[None]:
    """Inside, the object's `compute` exchanges its state among ranks with different samples."""
    mesh = engine.ctx.mesh
    several = mesh.size("batch") > 1
    settings: dict[str, Any] = {"distributed_available_fn": lambda: several}
    if several:
        settings["process_group"] = mesh.group("batch")
    before = {name: getattr(metric, name) for name in settings if hasattr(metric, name)}
    for name in before:
        setattr(metric, name, settings[name])
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(metric, name, value)


def _number(value: Any) -> float | None:
    """A number, or a tensor of one element, as a float; None for all else."""
    if isinstance(value, Tensor):
        return float(value) if value.numel() == 1 else None
    return float(value) if hasattr(value, "__float__") else None
