"""CUDA graphs of a module's forward: recorded at the first call with inputs of some shapes,
replayed later.

A recorded call works on copies of its inputs, and what it returns is copied, so callers see no
difference but speed. Graphs hold the addresses of weights: values may change in place, but weights
may not move.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ds_core.errors import UsageError
from ds_core.process import log_once

log = logging.getLogger("ds_inference")

MOST = 32
"""Graphs that are kept; the one that was used longest ago goes first."""

Record = Callable[[torch.device, Callable[[], Any]], tuple[Callable[[], None], Any]]


def record(device: torch.device, work: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
    """Record what `work` queues on `device`, without running it; what runs it, and what `work`
    returned.
    """
    with torch.cuda.device(device):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            returned = work()
    return graph.replay, returned


@dataclass(slots=True)
class _Recorded:
    # Tensors that the graph reads; a call copies its own into them.
    inputs: list[Tensor]
    replay: Callable[[], None]
    # What the graph writes; a call returns a copy of it.
    returned: Any


class Graphs:
    """Calls `module`, whose weights are on `device`, by graphs; where that cannot be, the module
    itself.
    """

    def __init__(self, module: nn.Module, device: torch.device, record: Record = record) -> None:
        self._module = module
        self._device = device
        self._record = record
        # In the order of use: the first was used longest ago.
        self._found: dict[tuple[Any, ...], _Recorded] = {}
        self._caches = "use_cache" in inspect.signature(module.forward).parameters

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        """What the module says of these inputs."""
        if self._caches:  # a cache that the module returns would be overwritten by the next call
            kwargs.setdefault("use_cache", False)
        key = self._key(inputs, kwargs)
        if key is None:
            what = (
                f"{type(self._module).__name__} answers a call without a graph: an input is no "
                f"tensor on {self._device}"
            )
            log_once(log, logging.WARNING, f"{what} and no plain value, or use_cache is set")
            return self._module(*inputs, **kwargs)
        given = [x for _, x in _name_inputs(inputs, kwargs) if isinstance(x, Tensor)]
        # Popped and added again below, which makes it the last to go.
        found = self._found.pop(key, None)
        if found is None:
            found = self._record_call(inputs, kwargs)
            # Each graph has memory of its own.
            if len(self._found) >= MOST:
                del self._found[next(iter(self._found))]
        self._found[key] = found
        for mine, new in zip(found.inputs, given, strict=True):
            mine.copy_(new, non_blocking=True)
        found.replay()
        return _copy(found.returned)

    def _key(self, inputs: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...] | None:
        """What calls share that one graph serves; None: no graph can."""
        if kwargs.get("use_cache"):
            return None
        parts: list[Any] = []
        for name, value in _name_inputs(inputs, kwargs):
            if isinstance(value, Tensor) and value.device == self._device:
                parts.append((name, value.shape, value.dtype))
            # Plain values are recorded as they are, so each value is another graph.
            elif value is None or type(value) in (bool, int, float, str):
                parts.append((name, type(value), value))
            else:
                return None
        return tuple(parts)

    def _record_call(self, inputs: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Recorded:
        mine = tuple(_clone(x) for x in inputs)
        named = {name: _clone(x) for name, x in kwargs.items()}
        # makes ready what may not be made while a graph is recorded
        _copy(self._module(*mine, **named))
        try:
            replay, returned = self._record(self._device, lambda: self._module(*mine, **named))
        except RuntimeError as error:
            name = type(self._module).__name__
            raise UsageError(
                f"enable_cuda_graph: {name} cannot be recorded ({str(error).splitlines()[0]}); "
                "leave the key out"
            ) from error
        return _Recorded(
            [x for _, x in _name_inputs(mine, named) if isinstance(x, Tensor)], replay, returned
        )


def _name_inputs(
    inputs: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[tuple[int | str, Any]]:
    """The inputs of a call with their places or names; in one order, however they were given."""
    yield from enumerate(inputs)
    yield from sorted(kwargs.items())


def _clone(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _copy(value: Any) -> Any:
    """`value` with every tensor in it copied; UsageError where there is something else in it."""
    if isinstance(value, Tensor):
        return value.clone()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):  # also transformers' outputs
        return type(value)(**{name: _copy(each) for name, each in value.items()})
    if isinstance(value, (tuple, list)):
        parts = [_copy(each) for each in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    raise UsageError(
        f"enable_cuda_graph: the module returns a {type(value).__name__}, which cannot be copied"
    )
