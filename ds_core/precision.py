"""Mixed precision: dtypes of a run, the loss scaler and autocast."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ds_core.errors import LossScaleError
from ds_core.nested import map_leaves
from ds_core.process import STATE, tell_once
from ds_core.stash import StashKey

if TYPE_CHECKING:
    from ds_core.accelerator import Accelerator
    from ds_core.config import RunConfig
    from ds_core.running import RunningEngine

__all__ = [
    "DTYPES",
    "WIRE_DTYPES",
    "LossScaler",
    "Precision",
    "autocast_context",
    "cast_floats",
    "cast_module",
    "get_default_autocast_lower_precision_modules",
    "init_autocast_params",
    "is_autocast_initialized",
    "make_precision",
    "wire_dtypes",
]

log = logging.getLogger("ds_core.precision")

DTYPES = {
    **dict.fromkeys(("fp32", "float32", "float"), torch.float32),
    **dict.fromkeys(("fp16", "float16", "half"), torch.float16),
    **dict.fromkeys(("bf16", "bfloat16"), torch.bfloat16),
}
WIRE_DTYPES: StashKey[dict[nn.Parameter, torch.dtype]] = StashKey("gradient wire dtypes")
"""Parameters whose gradients travel in another dtype than `Precision.wire` says."""


@dataclass(frozen=True, slots=True)
class Precision:
    """The dtypes of a run; None leaves the model's own.

    param: model weights. master: what the optimizer updates. accumulate: gradients between micro-batches.
    wire: gradient reduction. autocast: compute dtype inside forward. cast_inputs: ``fp16.auto_cast``.
    skip_nonfinite: a step with an inf or NaN gradient is skipped (else the gradient is let through, with a warning).
    scales_loss: losses are multiplied by a `LossScaler`.
    """

    param: torch.dtype | None = None
    buffer: torch.dtype | None = None
    master: torch.dtype | None = None
    accumulate: torch.dtype | None = None
    wire: torch.dtype | None = None
    autocast: torch.dtype | None = None
    autocast_modules: tuple[str, ...] = ()
    cast_inputs: bool = False
    skip_nonfinite: bool = True
    scales_loss: bool = False


class LossScaler:
    """Static or dynamic loss scale (api.md section 4.2; Micikevicius et al., "Mixed Precision Training", section 3.2).

    scale: multiplies the loss. window: clean steps before it doubles. hysteresis: overflows tolerated before it
    halves. minimum: overflowing at this scale raises LossScaleError.
    """

    def __init__(
        self,
        scale: float,
        *,
        dynamic: bool,
        window: int = 1000,
        hysteresis: int = 2,
        consecutive_hysteresis: bool = False,
        minimum: float = 1.0,
        factor: float = 2.0,
    ) -> None:
        self.scale, self.dynamic, self.window, self.minimum, self.factor = (
            float(scale),
            dynamic,
            window,
            minimum,
            factor,
        )
        self.hysteresis, self.consecutive_hysteresis = hysteresis, consecutive_hysteresis
        self.current_hysteresis = hysteresis
        self.iteration, self.last_overflow = 0, -1

    def update(self, overflow: bool) -> None:
        """Account for one optimizer step. The step itself is skipped by the engine whenever `overflow` is true.

        Raises LossScaleError when a dynamic scale at its minimum overflows again.
        """
        if not self.dynamic:
            return
        if overflow:
            if self.hysteresis == 1 or self.current_hysteresis == 1:
                if self.scale == self.minimum:
                    raise LossScaleError(
                        f"gradients overflow at the minimum loss scale {self.minimum:g} (step "
                        f"{self.iteration}); lower the "
                        "learning rate, check the data for inf/NaN, or train in bf16"
                    )
                self.scale = max(self.scale / self.factor, self.minimum)
            else:
                self.current_hysteresis -= 1
            self.last_overflow = self.iteration
        else:
            if self.consecutive_hysteresis:
                self.current_hysteresis = self.hysteresis
            stable = self.iteration - self.last_overflow - 1
            if stable > 0 and stable % self.window == 0:
                if not self.consecutive_hysteresis:
                    self.current_hysteresis = self.hysteresis
                self.scale *= self.factor
        self.iteration += 1

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs."""
        return {
            "scale": self.scale,
            "iteration": self.iteration,
            "last_overflow": self.last_overflow,
            "current_hysteresis": self.current_hysteresis,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The reverse of `state_dict`; a static scale keeps what the config says."""
        if self.dynamic:
            self.scale = float(state["scale"])
        self.iteration, self.last_overflow = int(state["iteration"]), int(state["last_overflow"])
        self.current_hysteresis = int(state["current_hysteresis"])


def make_precision(config: RunConfig) -> tuple[Precision, LossScaler | None]:
    """What the precision sections of `config` ask for."""
    core = config.core
    low = torch.float16 if core.fp16.enabled else torch.bfloat16 if core.bf16.enabled else None
    types = core.data_types
    accumulate = DTYPES[types.grad_accum_dtype] if types.grad_accum_dtype else None
    if core.bf16.enabled and core.bf16.immediate_grad_update:
        accumulate = torch.float32
    auto = core.torch_autocast
    autocast = DTYPES[auto.dtype or "bfloat16"] if auto.enabled else None
    scaler = _make_scaler(config, autocast)
    precision = Precision(
        param=low or (DTYPES[types.param_dtype] if types.param_dtype else None),
        buffer=DTYPES[types.buffer_dtype] if types.buffer_dtype else None,
        master=torch.float32 if low else None,
        accumulate=accumulate,
        wire=DTYPES[core.communication_data_type] if core.communication_data_type else None,
        autocast=autocast,
        autocast_modules=_autocast_modules(auto.lower_precision_safe_modules) if auto.enabled else (),
        cast_inputs=bool(core.fp16.enabled and core.fp16.auto_cast),
        skip_nonfinite=not core.bf16.enabled or core.bf16.check_grad_overflow,
        scales_loss=scaler is not None,
    )
    return precision, scaler


def _make_scaler(config: RunConfig, autocast: torch.dtype | None) -> LossScaler | None:
    fp16 = config.core.fp16
    if fp16.enabled:
        if fp16.loss_scale:
            return LossScaler(fp16.loss_scale, dynamic=False)
        return LossScaler(
            2.0**fp16.initial_scale_power,
            dynamic=True,
            window=fp16.loss_scale_window,
            hysteresis=fp16.hysteresis,
            consecutive_hysteresis=fp16.consecutive_hysteresis,
            minimum=fp16.min_loss_scale,
        )
    if autocast == torch.float16:
        # The schedule of torch.amp.GradScaler: halve at once, double after 2000 clean steps, no practical floor.
        return LossScaler(2.0**16, dynamic=True, window=2000, hysteresis=1, minimum=2.0**-24)
    return None


def cast_module(module: nn.Module, precision: Precision) -> None:
    """Cast floating-point weights in place; parameters keep their identity.

    Buffers keep their dtype unless `Precision.buffer` is set. But running statistics of a batch norm become what its
    weights are: torch's kernels take both in one dtype.
    """
    with torch.no_grad():
        if precision.param is not None:
            for param in module.parameters():
                if param.is_floating_point() and param.dtype != precision.param:
                    param.data = param.data.to(precision.param)
        for owner in module.modules():
            target = precision.buffer
            if target is None and isinstance(owner, nn.modules.batchnorm._BatchNorm) and owner.affine:
                target = owner.weight.detach().dtype
            if target is not None:
                for name, buffer in owner.named_buffers(recurse=False):
                    if buffer.is_floating_point() and buffer.dtype != target:
                        owner._buffers[name] = buffer.to(target)


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """`value` with every floating-point tensor in it (in lists, tuples, dicts) cast."""
    return map_leaves(lambda x: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x, value)


# -- autocast ----------------------------------------------------------------------------------------------------


def get_default_autocast_lower_precision_modules() -> list[str]:
    """Dotted names of the module classes whose gradients may travel in the autocast dtype."""
    return ["torch.nn.Linear", "torch.nn.Conv1d", "torch.nn.Conv2d", "torch.nn.Conv3d"]


def _autocast_modules(names: Iterable[str] | None) -> tuple[str, ...]:
    return tuple(names) if names is not None else tuple(get_default_autocast_lower_precision_modules())


def init_autocast_params(
    engine: RunningEngine, dtype: torch.dtype, torch_autocast_lower_precision_safe_modules: list[str] | None = None
) -> None:
    """Let the gradients of the named module classes travel in `dtype`; call it before the first backward.

    torch_autocast_lower_precision_safe_modules: dotted class names; None means the default list.
    """
    engine.ctx.stash[WIRE_DTYPES] = wire_dtypes(
        engine.module, dtype, _autocast_modules(torch_autocast_lower_precision_safe_modules)
    )


def is_autocast_initialized() -> bool:
    """Whether gradients of an engine of this process travel as `torch_autocast` or `init_autocast_params` says."""
    return any(e.ctx.stash.get(WIRE_DTYPES) is not None for e in STATE.engines)


def wire_dtypes(module: nn.Module, dtype: torch.dtype, class_names: Iterable[str]) -> dict[nn.Parameter, torch.dtype]:
    """The parameters that belong directly to modules of the named classes, each with `dtype`."""
    names = set(class_names)
    found: dict[nn.Parameter, torch.dtype] = {}
    for part in module.modules():
        for cls in type(part).__mro__:
            short = f"torch.nn.{cls.__name__}" if cls.__module__.startswith("torch.nn.") else ""
            if {short, f"{cls.__module__}.{cls.__qualname__}"} & names:
                found.update(dict.fromkeys(part.parameters(recurse=False), dtype))
    return found


def autocast_context(precision: Precision, accelerator: Accelerator) -> contextlib.AbstractContextManager[Any] | None:
    """The context for one forward, or None when nothing needs one.

    The config decides: an autocast of the caller's around the engine is overridden (told once).
    """
    device = accelerator.device_type
    if precision.autocast is not None:
        if torch.is_autocast_enabled(device):
            tell_once(
                log,
                logging.INFO,
                "the torch_autocast section decides the dtype inside the engine; the autocast around it has "
                "no effect there",
            )
        return accelerator.autocast(precision.autocast)
    if torch.is_autocast_enabled(device):
        tell_once(
            log,
            logging.WARNING,
            "autocast is on around the engine but not in its config; it is off inside forward. Add a "
            "torch_autocast section",
        )
        return accelerator.autocast(torch.get_autocast_dtype(device), enabled=False)
    return None
