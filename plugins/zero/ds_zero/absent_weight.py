"""What ``state_dict()`` gives for a sharded weight: its name, shape and dtype, and an error where it is used."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ds_core.errors import UsageError

__all__ = ["AbsentWeight", "absent"]


def absent(key: str, shape: torch.Size, dtype: torch.dtype) -> AbsentWeight:
    """The `AbsentWeight` called `key` in its state dict."""
    made: AbsentWeight = torch.Tensor._make_wrapper_subclass(
        AbsentWeight, shape, dtype=dtype, device=torch.device("meta")
    )
    made.key = key
    return made


class AbsentWeight(torch.Tensor):
    """A tensor without values, on the meta device. Computing with it, copying or saving it raises UsageError.

    So code that reads a model's keys and shapes works, and none can save a checkpoint without weights.
    """

    key: str

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise _refusal(next(value.key for value in tree_leaves((args, kwargs)) if isinstance(value, cls)))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise _refusal(self.key)

    def __deepcopy__(self, memo: Any) -> Any:
        raise _refusal(self.key)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"AbsentWeight({self.key!r}, shape={tuple(self.shape)}, dtype={self.dtype})"


def _refusal(key: str) -> UsageError:
    return UsageError(
        f"state_dict(): parameter {key!r} is partitioned over ranks, so its values are not here; use "
        "engine.save_checkpoint or engine.save_16bit_model, or call state_dict() on every rank inside "
        "ds_zero.GatheredParameters(module), which takes the memory of the unsharded model"
    )
