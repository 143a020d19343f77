"""Writing files as DeepSpeed reads them: those of `torch.save`, which are pickles of plain values
and tensors.

DeepSpeed's own loader takes nothing else. Where it expects an instance of a class of its own, the
file names that
class: `loss_scaler` and `fragment` stand for such instances, so DeepSpeed need not be installed
    here.
"""

from __future__ import annotations

import io
import pickle
import sys
import types
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from ds_checkpoint.folder import files
from torch import Tensor

from ds_core.errors import CheckpointError


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


@dataclass(frozen=True, eq=False, slots=True)
class Later:
    """A tensor that is read when its bytes are written: a file of many needs memory for one."""

    shape: torch.Size
    dtype: torch.dtype
    give: Callable[[], Tensor]


class _Storage:
    """What stands for a tensor's storage in the pickle."""

    def __init__(self, of: Later, key: str) -> None:
        self.of = of
        self.key = key

    @property
    def size(self) -> int:
        """Elements."""
        return self.of.shape.numel()


_KINDS = {
    torch.float64: "DoubleStorage",
    torch.float32: "FloatStorage",
    torch.float16: "HalfStorage",
    torch.bfloat16: "BFloat16Storage",
    torch.int64: "LongStorage",
    torch.int32: "IntStorage",
    torch.int16: "ShortStorage",
    torch.int8: "CharStorage",
    torch.uint8: "ByteStorage",
    torch.bool: "BoolStorage",
}


class _Streaming(_Pickler):
    """Pickles tensors by name of storage, as `torch.save` does, and collects the storages."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=2)
        self.storages: list[_Storage] = []

    def reducer_override(self, obj: Any) -> Any:
        """See `pickle.Pickler`."""
        if isinstance(obj, Tensor):
            values = obj.detach()
            obj = Later(obj.shape, obj.dtype, lambda: values)
        if not isinstance(obj, Later):
            return NotImplemented
        if obj.dtype not in _KINDS:
            raise CheckpointError(f"a tensor of {obj.dtype} has no form that DeepSpeed loads")
        storage = _Storage(obj, str(len(self.storages)))
        self.storages.append(storage)
        stride = torch.empty(obj.shape, device="meta").stride()
        # What torch.save writes of a tensor: torch.load calls it.
        rebuild = torch._utils._rebuild_tensor_v2
        return rebuild, (storage, 0, tuple(obj.shape), stride, False, OrderedDict())

    def persistent_id(self, obj: Any) -> Any:
        """See `pickle.Pickler`."""
        if not isinstance(obj, _Storage):
            return None
        return "storage", getattr(torch, _KINDS[obj.of.dtype]), obj.key, "cpu", obj.size


def save_streamed(value: Any, path: Path) -> None:
    """As `save`, where `value` may hold `Later`: one tensor is in memory at a time."""
    files.replace_with(path, lambda temporary: _write_streamed(value, temporary))


def _write_streamed(value: Any, path: Path) -> None:
    text = io.BytesIO()
    pickler = _Streaming(text)
    pickler.dump(value)
    with torch.serialization._open_zipfile_writer(str(path)) as file:
        file.write_record("data.pkl", text.getvalue(), len(text.getvalue()))
        file.write_record("byteorder", sys.byteorder, len(sys.byteorder))
        for storage in pickler.storages:
            values = storage.of.give().detach().contiguous()
            if values.untyped_storage().nbytes() != values.nbytes:
                values = values.clone()
            file.write_record(f"data/{storage.key}", values.untyped_storage(), values.nbytes)
