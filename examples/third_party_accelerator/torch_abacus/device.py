"""``torch.abacus``: what scripts, torch and ds_core ask of a device, under torch's usual names."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

_library = torch.ops.abacus

device_count = _library.device_count
current_device = _library.current_device
set_device = _library.set_device


def is_available() -> bool:
    """Whether there is a device."""
    return device_count() > 0


def is_initialized() -> bool:
    """False: there is nothing to initialize."""
    return False


def get_device_properties(index: int | None = None) -> Any:
    """What is known of a device: its name and its memory in bytes."""
    return SimpleNamespace(name="abacus", total_memory=_library.total_memory())


@contextlib.contextmanager
def device(index: Any) -> Iterator[None]:
    """Make a device the current one for a while."""
    before = current_device()
    set_device(_index(index))
    try:
        yield
    finally:
        set_device(before)


def _index(index: Any = None) -> int:
    if index is None:
        return current_device()
    found = index if isinstance(index, int) else torch.device(index).index
    return current_device() if found is None else found


# -- streams and events ----------------------------------------------------------------------------


def Stream(index: Any = None, priority: int = 0) -> torch.Stream:
    """A new stream of a device."""
    return torch.Stream(torch.device("abacus", _index(index)), priority=priority)


Event = partial(torch.Event, "abacus")


def current_stream(index: Any = None) -> torch.Stream:
    """The stream on which work is queued."""
    return torch.accelerator.current_stream(_index(index))


@contextlib.contextmanager
def stream(stream: torch.Stream | None) -> Iterator[None]:
    """Queue work on `stream`."""
    if stream is None:
        yield
        return
    before = current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)


def synchronize(index: Any = None) -> None:
    """Wait for all streams of a device."""
    _library.synchronize(_index(index))


# -- memory ----------------------------------------------------------------------------------------


def memory_allocated(index: Any = None) -> int:
    """Bytes in use."""
    return _library.memory_allocated(_index(index))


def max_memory_allocated(index: Any = None) -> int:
    """The peak of `memory_allocated`."""
    return _library.max_memory_allocated(_index(index))


def reset_peak_memory_stats(index: Any = None) -> None:
    """Let the peak start from what is in use now."""
    _library.reset_peak_memory_stats(_index(index))


def mem_get_info(index: Any = None) -> tuple[int, int]:
    """(free, total) bytes."""
    total = _library.total_memory()
    return total - memory_allocated(index), total


# -- random numbers and dtypes ---------------------------------------------------------------------


def manual_seed(seed: int) -> None:
    """Seed the current device."""
    _library.manual_seed(current_device(), seed)


def manual_seed_all(seed: int) -> None:
    """Seed all devices; ``torch.manual_seed`` calls this too."""
    for index in range(device_count()):
        _library.manual_seed(index, seed)


def get_rng_state(index: Any = None) -> Tensor:
    """State of a device's generator."""
    return _library.rng_state(_index(index))


def set_rng_state(state: Tensor, index: Any = None) -> None:
    """Restore a state from `get_rng_state`."""
    _library.set_rng_state(_index(index), state)


def _is_in_bad_fork() -> bool:
    return False


def get_amp_supported_dtype() -> list[torch.dtype]:
    """What ``torch.autocast("abacus")`` may compute in."""
    return [torch.bfloat16, torch.float16]
