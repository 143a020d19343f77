"""`get_model_profile`: what one call of a model costs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ds_core.engine import eval_mode
from ds_core.errors import UsageError
from ds_core.nested import map_leaves
from ds_flops_profiler.profiler import FlopsProfiler
from ds_flops_profiler.units import macs_to_string, number_to_string, params_to_string

MODES = ("forward", "generate")


def get_model_profile(
    model: nn.Module,
    input_shape: tuple[int, ...] | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    print_profile: bool = True,
    detailed: bool = True,
    module_depth: int = -1,
    top_modules: int = 1,
    warm_up: int = 1,
    as_string: bool = True,
    output_file: str | None = None,
    ignore_modules: Collection[type] | None = None,
    mode: str = "forward",
    *,
    device: str | None = None,
) -> tuple[Any, Any, Any]:
    """Call `model` in evaluation mode, and return its FLOPs, MACs and parameters.

    They are numbers, or strings with units.

    input_shape: the model is called with one tensor of ones of this shape, in its first parameter's
        dtype and on its device; else with `args` and `kwargs`.
    print_profile, detailed, module_depth, top_modules, output_file: see
        `FlopsProfiler.print_model_profile`.
    warm_up: calls before the one that is timed; operations are counted in the last of them.
    ignore_modules: classes of modules whose work counts at their callers.
    mode: "forward", or "generate" for ``model.generate``.
    device: "meta" computes nothing and allocates nothing, whatever device the model is on.
    """
    call = _call(model, input_shape, args, kwargs or {}, mode, device)
    profiler = FlopsProfiler(model)
    with eval_mode(profiler.model):
        for _ in range(warm_up - 1 if device is None else 0):
            call()
        profiler.attach(ignore_modules)
        counter = profiler.counter
        try:
            with counter.measuring():
                call()
            if device is None and warm_up > 0:
                counter.reset_clock()
                with counter.measuring(operations=False):
                    call()
        finally:
            profiler.stop_profile()
    flops = profiler.get_total_flops()
    macs = profiler.get_total_macs()
    params = profiler.get_total_params()
    if print_profile:
        profiler.print_model_profile(warm_up, module_depth, top_modules, detailed, output_file)
    profiler.end_profile()
    return (
        (number_to_string(flops), macs_to_string(macs), params_to_string(params))
        if as_string
        else (flops, macs, params)
    )


def _call(
    model: nn.Module,
    shape: tuple[int, ...] | None,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    mode: str,
    device: str | None,
) -> Callable[[], Any]:
    """The call to profile. Raises UsageError for arguments that fit no call."""
    if mode not in MODES:
        raise UsageError(f"mode={mode!r}; it is {' or '.join(map(repr, MODES))}")
    if device not in (None, "meta"):
        raise UsageError(
            f"device={device!r}; it is 'meta', or None for the device that the model is on"
        )
    if shape is not None:
        if not isinstance(shape, (tuple, list)) or not shape:
            raise UsageError(f"input_shape={shape!r}; it is a tuple of at least one number")
        like = next(model.parameters(), torch.empty(0))
        args = [torch.ones(shape, dtype=like.dtype, device=like.device)]
    elif not args and not kwargs:
        raise UsageError(
            "get_model_profile needs input_shape, or the arguments of a call: args=[...], "
            "kwargs={...}"
        )
    if device is None:
        function: Any = model if mode == "forward" else model.generate
        return functools.partial(function, *args, **kwargs)
    if mode != "forward":
        raise UsageError("device='meta' has no values to generate from: use mode='forward'")
    weights = {name: t.to(device) for name, t in _named_tensors(model)}
    given = map_leaves(
        lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf,
        (list(args), dict(kwargs)),
    )
    return lambda: torch.func.functional_call(model, weights, tuple(given[0]), given[1])


def _named_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]
