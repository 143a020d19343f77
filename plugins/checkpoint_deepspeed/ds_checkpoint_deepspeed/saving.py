"""Writing files as DeepSpeed reads them: those of `torch.save`, which are pickles of plain values
and tensors.

DeepSpeed's own loader takes nothing else. Where it expects an instance of a class of its own, the
file names that
class: `loss_scaler` and `fragment` stand for such instances, so DeepSpeed need not be installed
    here.
"""

from __future__ import annotations

import pickle
import types
from pathlib import Path
from typing import Any

import torch
from ds_checkpoint.folder import files


class _Theirs:
    """An instance of a class of DeepSpeed's, by its attributes.

    `theirs` is the class's full name.
    """

    theirs = ""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


class _Fragment(_Theirs):
    theirs = "deepspeed.utils.tensor_fragment fragment_address"


class _LossScaler(_Theirs):
    theirs = "deepspeed.runtime.fp16.loss_scaler LossScaler"


class _DynamicLossScaler(_Theirs):
    theirs = "deepspeed.runtime.fp16.loss_scaler DynamicLossScaler"


def fragment(start: int, numel: int) -> Any:
    """Where a parameter lies in a flat tensor."""
    return _Fragment(numel=numel, start=start)


def loss_scaler(state: dict[str, Any] | None) -> Any:
    """The loss scaler, of our own state of one; None: a scale of 1."""
    if state is None:
        return _LossScaler(cur_scale=1.0, dynamic=False, dtype=torch.float32)
    return _DynamicLossScaler(
        cur_scale=float(state["scale"]),
        cur_iter=int(state["iteration"]),
        last_overflow_iter=int(state["last_overflow"]),
        scale_factor=2.0,
        scale_window=1000,
        min_scale=1.0,
        delayed_shift=2,
        cur_hysteresis=int(state["current_hysteresis"]),
        consecutive_hysteresis=False,
        raise_error_at_min_scale=True,
        dynamic=True,
        dtype=torch.float16,
    )


_InPython: Any = pickle._Pickler  # which can be given how to name a class


class _Pickler(_InPython):  # type: ignore[misc]
    def save_global(self, obj: Any, name: str | None = None) -> None:
        if isinstance(obj, type) and issubclass(obj, _Theirs):
            self.write(pickle.GLOBAL + obj.theirs.replace(" ", "\n").encode() + b"\n")
            self.memoize(obj)
        else:
            super().save_global(obj, name)


_pickling = types.ModuleType("ds_checkpoint_deepspeed.pickling")
_pickling.Pickler = _Pickler  # type: ignore[attr-defined]


def save(value: Any, path: Path) -> None:
    """Write `value` to `path`, which has the name once all of it is there."""
    files.replace_with(
        path, lambda temporary: torch.save(value, temporary, pickle_module=_pickling)
    )
