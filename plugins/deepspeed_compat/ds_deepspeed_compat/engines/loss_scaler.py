"""``deepspeed.runtime.fp16.loss_scaler``: loss scales for loops of a script's own, and views of an
engine's.

The rule by which a scale falls and grows is the core's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from ds_core.errors import LossScaleError, UsageError
from ds_core.precision import LossScaler as CoreScaler
from ds_deepspeed_compat.utils.norms import has_inf_or_nan

if TYPE_CHECKING:
    from ds_core import Engine


class _Scale(Protocol):
    @property
    def scale(self) -> float: ...

    def update(self, overflow: bool) -> None: ...


class _EngineScale:
    """The scale of an engine, which updates it itself."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    @property
    def scale(self) -> float:
        return self.engine.loss_scale

    def update(self, overflow: bool) -> None:
        raise UsageError(
            "engine.step() updates the loss scale; make your own scaler for a loop without it"
        )


class LossScalerBase:
    """A number that losses are multiplied by."""

    dynamic = False

    def __init__(self, cur_scale: float) -> None:
        self._own: _Scale = CoreScaler(cur_scale, dynamic=False)

    @property
    def loss_scale(self) -> float:
        """The scale now."""
        return self._own.scale

    cur_scale = loss_scale

    def scale_gradient(
        self, module: Any, grad_in: Iterable[Tensor], grad_out: Any
    ) -> tuple[Tensor, ...]:
        """Gradients times the scale, for a module's backward hook."""
        return tuple(self.loss_scale * grad for grad in grad_in)

    def scale_loss(self, loss: Tensor) -> Tensor:
        """The loss times the scale."""
        return loss * self.loss_scale

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Backward of the loss times the scale."""
        self.scale_loss(loss).backward(retain_graph=retain_graph)

    def update_scale(self, overflow: bool) -> None:
        """Called once per step, with whether gradients were not finite."""
        self._own.update(overflow)


class LossScaler(LossScalerBase):
    """A loss scale that stays."""

    def __init__(self, scale: float = 1) -> None:
        super().__init__(scale)

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        """Never: gradients are not looked at."""
        return False


class DynamicLossScaler(LossScalerBase):
    """A loss scale that falls with overflows and grows again.

    It begins at init_scale, is halved after delayed_shift overflows, and doubles after scale_window
    steps without one; with consecutive_hysteresis such steps give overflows back. An overflow at
    min_scale is an error unless raise_error_at_min_scale is False.
    dtype: of gradients, for messages alone.
    """

    dynamic = True

    def __init__(
        self,
        init_scale: float,
        scale_window: int,
        min_scale: float,
        delayed_shift: int,
        consecutive_hysteresis: bool,
        raise_error_at_min_scale: bool = True,
        dtype: torch.dtype = torch.half,
    ) -> None:
        self._own = self._rule = CoreScaler(
            init_scale,
            dynamic=True,
            window=scale_window,
            hysteresis=delayed_shift,
            consecutive_hysteresis=consecutive_hysteresis,
            minimum=min_scale,
        )
        self.raise_error_at_min_scale = raise_error_at_min_scale
        self.dtype = dtype

    @property
    def scale_factor(self) -> float:
        """By which it falls and grows."""
        return self._rule.factor

    @property
    def scale_window(self) -> int:
        """Steps without overflow before it grows."""
        return self._rule.window

    @property
    def min_scale(self) -> float:
        """Where it ends to fall."""
        return self._rule.minimum

    @property
    def delayed_shift(self) -> int:
        """Overflows before it falls."""
        return self._rule.hysteresis

    @property
    def cur_hysteresis(self) -> int:
        """Overflows that are left before it falls."""
        return self._rule.current_hysteresis

    @property
    def cur_iter(self) -> int:
        """Steps so far."""
        return self._rule.iteration

    @property
    def last_overflow_iter(self) -> int:
        """The last step with an overflow; -1: none."""
        return self._rule.last_overflow

    def has_overflow_serial(self, params: Iterable[Tensor]) -> bool:
        """Whether a gradient of this rank is not finite."""
        return any(bool(has_inf_or_nan(param.grad)) for param in params if param.grad is not None)

    has_overflow = has_overflow_serial

    def update_scale(self, overflow: bool) -> None:
        """Called once per step. Raises LossScaleError for an overflow at the least scale."""
        try:
            super().update_scale(overflow)
        except LossScaleError:
            if self.raise_error_at_min_scale:
                raise
            self._rule.iteration += 1  # the scale stays where it is


def CreateLossScaler(
    dtype: torch.dtype,
    static_loss_scale: float,
    dynamic_scaling: bool,
    dynamic_loss_args: dict[str, Any] | None,
) -> LossScalerBase:
    """A scaler for gradients of `dtype`: one that changes where that is asked for, and 1 for any
    but fp16.

    dynamic_loss_args: those of `DynamicLossScaler`.

    Raises UsageError where a scale is to change and they are None.
    """
    # Only fp16 has a range so small that gradients need a scale.
    if dtype != torch.half:
        return LossScaler(1.0)
    if not dynamic_scaling:
        return LossScaler(static_loss_scale)
    if dynamic_loss_args is None:
        raise UsageError(
            "CreateLossScaler: a dynamic loss scale needs dynamic_loss_args, such as init_scale"
        )
    return DynamicLossScaler(dtype=dtype, **dynamic_loss_args)


def view_of(engine: Engine, *, dynamic: bool) -> LossScalerBase:
    """The loss scale of an engine as one of these objects."""
    kind: type[LossScalerBase] = DynamicLossScaler if dynamic else LossScaler
    # Without its constructor, which would make a scale of its own.
    view = kind.__new__(kind)
    view._own = _EngineScale(engine)
    return view


def to_python_float(t: Any) -> Any:
    """The number in a tensor."""
    return t.item() if hasattr(t, "item") else t[0]
