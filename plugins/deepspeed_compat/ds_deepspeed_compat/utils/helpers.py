"""Small functions of DeepSpeed's that training scripts call."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ds_deepspeed_compat.utils.logs import logger

F = TypeVar("F", bound=Callable[..., Any])


class DummyOptim:
    """Parameter groups without an optimizer."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        self.param_groups = [{"params": params}]


def noop_decorator(func: F) -> F:
    """`func` itself."""
    return func


class noop_context(contextlib.nullcontext[None]):
    """A context that does nothing."""


def ensure_directory_exists(filename: str) -> None:
    """Make the folder of a file."""
    if folder := os.path.dirname(filename):
        os.makedirs(folder, exist_ok=True)


def set_random_seed(seed: int) -> None:
    """Seed Python, numpy (where it is installed) and torch on all devices."""
    import random

    random.seed(seed)
    with contextlib.suppress(ImportError):
        import numpy

        numpy.random.seed(seed)
    torch.manual_seed(seed)


def move_to_device(
    item: Any, device: Any, criterion_func: Callable[[Any], bool] | None = None
) -> Any:
    """`item` with its tensors (those of `criterion_func`, if given) on `device`; lists, tuples and
    dicts are walked.
    """
    return _mapped(
        item, criterion_func or (lambda value: hasattr(value, "to")), lambda value: value.to(device)
    )


def copy_to_device(item: Any, device: Any, criterion_func: Callable[[Any], bool]) -> Any:
    """`move_to_device`, and what is there already is copied."""
    return _mapped(item, criterion_func, lambda value: value.to(device, copy=True))


def _mapped(item: Any, wanted: Callable[[Any], bool], change: Callable[[Any], Any]) -> Any:
    """`item` with what is `wanted` of it changed, in lists, tuples and dicts too."""
    if wanted(item):
        return change(item)
    if isinstance(item, (list, tuple)):
        return type(item)(_mapped(value, wanted, change) for value in item)
    if isinstance(item, dict):
        return {key: _mapped(value, wanted, change) for key, value in item.items()}
    return item


def call_to_str(base: str, *args: Any, **kwargs: Any) -> str:
    """A call as text: ``"name(1, key=2)"``."""
    shown = [repr(a) for a in args] + [f"{key}={value!r}" for key, value in kwargs.items()]
    return f"{base}({', '.join(shown)})"


def required_torch_version(
    min_version: float | None = None, max_version: float | None = None
) -> bool:
    """Whether torch's major.minor version lies in the range."""
    here = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])

    def parts(version: float) -> tuple[int, ...]:
        return tuple(int(part) for part in str(version).split("."))

    return (min_version is None or here >= parts(min_version)) and (
        max_version is None or here <= parts(max_version)
    )


# -- memory ----------------------------------------------------------------------------------------


def empty_cache() -> None:
    """Free the accelerator's cached memory."""
    from ds_core.accelerator import get_accelerator

    get_accelerator().empty_cache()


def see_memory_usage(message: str, force: bool = False) -> None:
    """Log memory in use, with `force` only (as documented: a call left in a script costs
    nothing)."""
    if force and (not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0):
        memory_status(message)


def memory_status(msg: str, print_rank: int = -1, reset_max: bool = False) -> None:
    """Log memory in use of the device and of the host, on one rank or (-1) on this."""
    from ds_core.accelerator import CpuAccelerator, get_accelerator

    if print_rank not in (
        -1,
        torch.distributed.get_rank() if torch.distributed.is_initialized() else 0,
    ):
        return
    device = get_accelerator()
    gib = 1024**3
    figures = [device.memory_allocated(), device.max_memory_allocated(), device.available_memory()]
    text = "%s | allocated %.2f GB, peak %.2f GB, available %.2f GB"
    if device.device_type != "cpu":
        host = CpuAccelerator()
        figures += [host.memory_allocated(), host.available_memory()]
        text += " | host: this process %.2f GB, available %.2f GB"
    logger.info(text, msg, *(figure / gib for figure in figures))
    if reset_max:
        device.reset_peak_memory_stats()


# -- layers into parts -----------------------------------------------------------------------------


def partition_uniform(num_items: int, num_parts: int) -> list[int]:
    """Boundaries of `num_parts` parts of nearly equal length (of dscore-pipeline)."""
    balance = importlib.import_module("ds_pipeline.layers.balance")
    bounds: list[int] = balance.uniform(num_items, num_parts)
    return bounds


def partition_balanced(weights: Sequence[float], num_parts: int) -> list[int]:
    """Boundaries of `num_parts` parts of nearly equal weight (of dscore-pipeline)."""
    balance = importlib.import_module("ds_pipeline.layers.balance")
    bounds: list[int] = balance.balanced(weights, num_parts)
    return bounds


# -- others ----------------------------------------------------------------------------------------


def is_zero_supported_optimizer(optimizer: Any) -> bool:
    """Whether the partitioner takes it: any torch optimizer."""
    return isinstance(optimizer, torch.optim.Optimizer)


def is_compile_supported() -> bool:
    """Whether torch.compile can be used."""
    return True


def is_compiling() -> bool:
    """Whether torch.compile is tracing."""
    return bool(torch.compiler.is_compiling())


def disable(func: F) -> F:
    """`func`, kept out of torch.compile."""
    return torch.compiler.disable(func)  # type: ignore[no-any-return]


def instrument_w_nvtx(func: F) -> F:
    """`func` with a range of its name in the profiler."""
    return torch.profiler.record_function(func.__qualname__)(func)


def zero_wrapper_for_fp_tensor_constructor(
    fn: Callable[..., Tensor], target_fp_dtype: torch.dtype, target_device: Any = None
) -> Callable[..., Tensor]:
    """`fn`, whose floating-point results have `target_fp_dtype` and are made on `target_device`
    by default.
    """

    @functools.wraps(fn)
    def wrapped(*args: Any, **kwargs: Any) -> Tensor:
        if target_device is not None:
            kwargs.setdefault("device", target_device)
        made = fn(*args, **kwargs)
        return made.to(target_fp_dtype) if made.is_floating_point() else made

    return wrapped
