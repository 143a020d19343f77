"""Precision modes: the record that describes one, the loss scaler, and what the core's own sections
ask for.

fp32, fp16, bf16 and torch_autocast are made by `make_precision` from the config. A plugin's mode
(hook `ds_precision`) is the same record; whatever trains reads `Context.precision` and does not
know whose it is.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ds_core.context import StashKey
from ds_core.errors import LossScaleError
from ds_core.process import log_once

if TYPE_CHECKING:
    from ds_core.accelerator import Accelerator
    from ds_core.config import RunConfig
    from ds_core.config.core import FP16
    from ds_core.plugins import Found, Plugins

log = logging.getLogger("ds_core.precision")

DTYPES: Mapping[str | None, torch.dtype] = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}
AUTOCAST_MODULES = tuple(f"torch.nn.{name}" for name in ("Linear", "Conv1d", "Conv2d", "Conv3d"))
"""Module classes whose gradients travel in the autocast dtype where the config names none."""
WIRE_DTYPES: StashKey[dict[nn.Parameter, torch.dtype]] = StashKey("gradient wire dtypes")
"""Parameters whose gradients travel in another dtype than `Precision.wire` says."""


@dataclass(frozen=True, slots=True)
class Precision:
    """One precision mode. A dtype of None keeps the model's own."""

    name: str = "fp32"
    """For the log, and compared between ranks with all other fields; it should hold every setting
    that changes numbers."""

    # -- dtypes of tensors
    param: torch.dtype | None = None
    """Model weights."""
    buffer: torch.dtype | None = None
    """Floating-point buffers."""
    master: torch.dtype | None = None
    """What the optimizer updates."""
    accumulate: torch.dtype | None = None
    """Gradients between micro-batches."""
    wire: torch.dtype | None = None
    """Gradients while they are reduced."""

    # -- the forward
    autocast: torch.dtype | None = None
    """``torch.autocast`` in forward, and with it the wire dtype of `autocast_modules`."""
    autocast_modules: tuple[str, ...] = ()
    """Names of classes."""
    cast_inputs: torch.dtype | None = None
    """Floating-point inputs of the model."""

    # -- the step
    skip_nonfinite: bool = True
    """Skip a step with inf or NaN in a gradient; else the weights take it, with a warning."""
    scaler: Callable[[], LossScaler] | None = None
    """Makes the loss scaler; None: losses are not scaled."""

    # -- what a plugin's mode may bring
    convert: Callable[[nn.Module], nn.Module] | None = None
    """``(model) -> model``, replaces layers; called once, in `Phase.PRECISION`. Parameters keep their
    names."""
    forward: Callable[[], contextlib.AbstractContextManager[Any]] | None = None
    """Makes a context manager for each forward, inside autocast."""
    plugin: Found | None = None
    """Whose mode it is; set by the core."""

    @property
    def plain_forward(self) -> bool:
        """Whether a forward needs neither a context nor casts."""
        return self.autocast is None and self.cast_inputs is None and self.forward is None

    def __str__(self) -> str:
        """All that differs from plain fp32; equal on two ranks if the modes are."""
        given = [
            (f.name, getattr(self, f.name))
            for f in fields(self)
            if getattr(self, f.name) != f.default
        ]
        return (
            ", ".join(
                value if name == "name" else f"{name} {_shown(value)}" for name, value in given
            )
            or self.name
        )


def _shown(value: Any) -> str:
    value = value.func if isinstance(value, partial) else value
    text = (
        getattr(value, "__qualname__", type(value).__qualname__) if callable(value) else str(value)
    )
    return text.removeprefix("torch.")


@dataclass(eq=False)
class LossScaler:
    """Static or dynamic loss scale.

    Source: api.md section 4.2; Micikevicius et al., "Mixed Precision Training", section 3.2.

    scale: multiplies the loss.
    window: clean steps before it grows by `factor`.
    hysteresis: overflows before it shrinks.
    minimum: an overflow at this scale raises LossScaleError.

    A plugin's scaler has `scale` and these methods.
    """

    scale: float
    _: KW_ONLY
    dynamic: bool
    window: int = 1000
    hysteresis: int = 2
    consecutive_hysteresis: bool = False
    minimum: float = 1.0
    factor: float = 2.0

    def __post_init__(self) -> None:
        self.scale = float(self.scale)
        self.current_hysteresis = self.hysteresis
        self.iteration = 0
        self.last_overflow = -1

    def update(self, overflow: bool) -> None:
        """Called once per optimizer step, on all ranks with the same value; the engine skips the
        step on overflow.

        Raises LossScaleError if a dynamic scale at its minimum overflows again.
        """
        if not self.dynamic:
            return
        # Clean steps since the last overflow, without this one.
        stable = self.iteration - self.last_overflow - 1
        grows = not overflow and stable > 0 and stable % self.window == 0
        if grows:
            self.scale *= self.factor
        if grows or (self.consecutive_hysteresis and not overflow):
            self.current_hysteresis = self.hysteresis
        if overflow:
            self.last_overflow = self.iteration
            if min(self.hysteresis, self.current_hysteresis) > 1:
                self.current_hysteresis -= 1
            elif self.scale == self.minimum:
                raise LossScaleError(
                    f"gradients overflow at the minimum loss scale {self.minimum:g} (step "
                    f"{self.iteration}); "
                    "lower the learning rate, check the data for inf/NaN, or train in bf16"
                )
            else:
                self.scale = max(self.scale / self.factor, self.minimum)
        self.iteration += 1

    def state_dict(self) -> dict[str, Any]:
        """Plain values, saved in checkpoints."""
        return {
            name: getattr(self, name)
            for name in ("scale", "iteration", "last_overflow", "current_hysteresis")
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state; a static scale stays as configured."""
        if self.dynamic:
            self.scale = float(state["scale"])
        self.iteration = int(state["iteration"])
        self.last_overflow = int(state["last_overflow"])
        self.current_hysteresis = int(state["current_hysteresis"])


def make_precision(config: RunConfig, plugins: Plugins | None = None) -> Precision:
    """The mode of a run: that of the core's sections, unless a plugin's section changes it (hook
    `ds_precision`).
    """
    base = _of_the_core(config)
    answer = (
        plugins.driver("ds_precision", config=config, base=base) if plugins is not None else None
    )
    return base if answer is None else replace(answer.value, plugin=answer.plugin)


def _of_the_core(config: RunConfig) -> Precision:
    core = config.core
    types = config.core.data_types
    auto = config.core.torch_autocast
    listed = auto.lower_precision_safe_modules
    mode = "fp16" if core.fp16.enabled else "bf16" if core.bf16.enabled else None
    whole = {
        "fp16": core.fp16.fp16_master_weights_and_grads,
        "bf16": core.bf16.bf16_master_weights_and_grads,
    }
    accumulate = (
        "fp32" if mode == "bf16" and core.bf16.immediate_grad_update else types.grad_accum_dtype
    )
    autocast: torch.dtype | None = (
        getattr(torch, auto.dtype or "bfloat16") if auto.enabled else None
    )
    return Precision(
        name=mode or ("autocast" if auto.enabled else "fp32"),
        param=DTYPES.get(mode or types.param_dtype),
        buffer=DTYPES.get(types.buffer_dtype),
        master=torch.float32 if mode and not whole[mode] else None,
        accumulate=DTYPES.get(accumulate),
        wire=DTYPES.get(core.communication_data_type),
        autocast=autocast,
        autocast_modules=()
        if not auto.enabled
        else tuple(listed)
        if listed is not None
        else AUTOCAST_MODULES,
        cast_inputs=torch.float16 if core.fp16.enabled and core.fp16.auto_cast else None,
        skip_nonfinite=not core.bf16.enabled or core.bf16.check_grad_overflow,
        scaler=_scaler(core.fp16, autocast),
    )


def _scaler(fp16: FP16, autocast: torch.dtype | None) -> Callable[[], LossScaler] | None:
    if fp16.enabled and fp16.loss_scale:
        return partial(LossScaler, fp16.loss_scale, dynamic=False)
    if fp16.enabled:
        return partial(
            LossScaler,
            2.0**fp16.initial_scale_power,
            dynamic=True,
            window=fp16.loss_scale_window,
            hysteresis=fp16.hysteresis,
            consecutive_hysteresis=fp16.consecutive_hysteresis,
            minimum=fp16.min_loss_scale,
        )
    if autocast == torch.float16:  # as torch.amp.GradScaler, with a minimum
        return partial(
            LossScaler, 2.0**16, dynamic=True, window=2000, hysteresis=1, minimum=2.0**-24
        )
    return None


def cast_module(module: nn.Module, precision: Precision) -> None:
    """Cast floating-point weights in place; parameters keep their identity.

    Buffers keep their dtype unless `Precision.buffer` is set, except the running statistics of a
    batch norm: torch's kernels need them in the dtype of its weights.
    """
    with torch.no_grad():
        if precision.param is not None:
            # Their data alone: the user's optimizer and tied modules refer to the parameters.
            for param in module.parameters():
                if param.is_floating_point() and param.dtype != precision.param:
                    param.data = param.data.to(precision.param)
        for owner in module.modules():
            target = precision.buffer
            if (
                target is None
                and isinstance(owner, nn.modules.batchnorm._BatchNorm)
                and owner.affine
            ):
                target = owner.weight.detach().dtype
            if target is not None:
                for name, buffer in owner.named_buffers(recurse=False):
                    if buffer.is_floating_point() and buffer.dtype != target:
                        owner._buffers[name] = buffer.to(target)


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """`value` with the floating-point tensors in it (in lists, tuples, mappings) cast to
    `dtype`."""
    from ds_core.nested import map_leaves

    return map_leaves(
        lambda x: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x, value
    )


# -- autocast --------------------------------------------------------------------------------------


def wire_dtypes(
    module: nn.Module, dtype: torch.dtype, class_names: Iterable[str]
) -> dict[nn.Parameter, torch.dtype]:
    """The parameters that belong directly to modules of the named classes, each with `dtype`."""
    names = set(class_names)
    found: dict[nn.Parameter, torch.dtype] = {}
    for part in module.modules():
        for cls in type(part).__mro__:
            short = f"torch.nn.{cls.__name__}" if cls.__module__.startswith("torch.nn.") else ""
            if {short, f"{cls.__module__}.{cls.__qualname__}"} & names:
                found.update(dict.fromkeys(part.parameters(recurse=False), dtype))
    return found


def forward_context(
    precision: Precision, accelerator: Accelerator
) -> contextlib.AbstractContextManager[Any] | None:
    """The context manager for one forward; None if it needs none.

    An autocast around the engine has no effect in it.
    """
    context = None
    device = accelerator.device_type
    inside = precision.autocast is not None
    if outside := torch.is_autocast_enabled(device):
        text = (
            "the autocast around the engine has no effect in it; its torch_autocast section decides"
        )
        missing = ", and there is none, so forward runs without autocast"
        log_once(
            log, logging.INFO if inside else logging.WARNING, text if inside else text + missing
        )
    if inside or outside:
        dtype = precision.autocast or torch.get_autocast_dtype(device)
        context = accelerator.autocast(dtype, enabled=inside)
    if precision.forward is None or context is None:
        return context if precision.forward is None else precision.forward()
    return _nested(context, precision.forward())


@contextlib.contextmanager
def _nested(
    outer: contextlib.AbstractContextManager[Any], inner: contextlib.AbstractContextManager[Any]
) -> Any:
    with outer, inner:
        yield
