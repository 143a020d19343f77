"""How many tokens a forward was given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

_IDS = (torch.int64, torch.int32)


def count_tokens(inputs: Any) -> int | None:
    """The elements of the first tensor of int64 or int32 of shape [batch, sequence]; None: there is
    none.
    """
    if isinstance(inputs, torch.Tensor):
        return inputs.numel() if inputs.dim() == 2 and inputs.dtype in _IDS else None
    if isinstance(inputs, Mapping):
        inputs = inputs.values()
    elif not isinstance(inputs, (list, tuple)):
        return None
    return next((count for item in inputs if (count := count_tokens(item)) is not None), None)
