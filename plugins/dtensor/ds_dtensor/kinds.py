"""What states an optimizer keeps of a parameter: one value per element, one in all, or others."""

from __future__ import annotations

import copy
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ds_core.errors import UsageError

if TYPE_CHECKING:
    from ds_access.param_shard import ParamShard
    from torch.optim import Optimizer


_BEGIN_AT_ZERO = {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer"}
"""States that are the same whether they are zeros or have not begun."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A state under one key.

    dtype: None for a number that is no tensor, whose `value` it is.
    shape: None for one value per element; () for one in all, whose `value` it is; else its own.
    """

    dtype: torch.dtype | None
    shape: tuple[int, ...] | None
    value: Any = None

    def row(self) -> list[Any]:
        """As JSON."""
        name = None if self.dtype is None else str(self.dtype).removeprefix("torch.")
        return [name, None if self.shape is None else list(self.shape), self.value]

    def at_zero(self) -> Kind:
        """The same before a step."""
        number = self.value is not None and not isinstance(self.value, bool)
        return replace(self, value=type(self.value)(0)) if number else self

    @classmethod
    def of(cls, row: list[Any]) -> Kind:
        """The reverse of `row`."""
        name, shape, value = row
        dtype = None if name is None else getattr(torch, name)
        return cls(dtype, None if shape is None else tuple(shape), value)


def kinds_here(held: ParamShard, optimizer: Optimizer) -> dict[str, Kind]:
    """The states that this rank has of a parameter.

    Raises UsageError for one that is no tensor and no number, or of another shape than the
    elements here, where ranks have parts of the parameter.
    """
    start, stop = held.updated_ranges[held.index]
    found = {}
    for key, value in optimizer.state.get(held.updated, {}).items():
        kind = _kind(key, value, held.updated)
        if kind is None or (kind.shape and (start, stop) != (0, held.numel)):
            shown = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise UsageError(
                f"EngineOptimizer: state {key!r} of {held.name!r} ({shown}) is neither one value "
                "per element nor one in all; use engine.save_checkpoint"
            )
        found[key] = kind
    return found


def _kind(key: str, value: Any, param: Tensor) -> Kind | None:
    if value is None or isinstance(value, (bool, int, float)):
        return Kind(None, None, value)
    if not isinstance(value, Tensor):
        return None
    if value.shape == param.shape and (value.dim() or key != "step"):
        return Kind(value.dtype, None)
    if value.dim() == 0:
        return Kind(value.dtype, (), value.item())
    return Kind(value.dtype, tuple(value.shape))


class Expected:
    """What states the first step of an optimizer will begin, seen in a copy of it that steps.

    Numbers are 0, as before a step.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._groups = {
            param: place
            for place, group in enumerate(optimizer.param_groups)
            for param in group["params"]
        }
        # Some optimizers treat matrices and vectors differently.
        self._found: dict[tuple[int, int], dict[str, Kind]] = {}

    def of(self, held: ParamShard) -> dict[str, Kind]:
        """The states of a parameter.

        Raises UsageError where a copy cannot step, or states depend on the shape.
        """
        key = (self._groups[held.updated], len(held.shape))
        if key not in self._found:
            self._found[key] = self._seen(*key)
        return self._found[key]

    def unused(self, held: ParamShard) -> dict[str, Kind]:
        """Those of a parameter that no step has used, so that files are complete.

        None where zeros would be another begin than the one that the optimizer makes.
        """
        group = self._optimizer.param_groups[self._groups[held.updated]]
        try:
            found = self.of(held)
        except UsageError:
            return {}
        return found if set(found) <= _BEGIN_AT_ZERO and not group.get("dampening") else {}

    def _seen(self, group: int, dims: int) -> dict[str, Kind]:
        optimizer = self._optimizer
        param = nn.Parameter(torch.zeros((4, 6, 2, 2)[:dims]))
        param.grad = torch.zeros_like(param)
        try:
            twin = copy.copy(optimizer)
            twin.state = defaultdict(dict)
            row = {**optimizer.param_groups[group], "params": [param]}
            twin.param_groups = [{**row, "fused": None} if "fused" in row else row]
            with torch.enable_grad():
                twin.step()
            kinds = {k: _kind(k, v, param) for k, v in twin.state[param].items()}
        except Exception as error:
            raise self._unknown(f"{type(error).__name__}: {error}") from error
        found: dict[str, Kind] = {}
        for key, kind in kinds.items():
            if kind is None or kind.shape:
                raise self._unknown(f"{key!r} depends on the shape of the parameter")
            found[key] = kind.at_zero()
        return found

    def _unknown(self, why: str) -> UsageError:
        return UsageError(
            f"EngineOptimizer: the states of {type(self._optimizer).__name__} have not begun, and "
            f"what they will be is unknown ({why}); take one step first, or use "
            "engine.load_checkpoint"
        )
