"""Small functions of ``deepspeed.checkpointing`` that autograd functions of a script's own use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ds_core.errors import UsageError


def detach_variable(
    inputs: tuple[Any, ...], device: torch.device | str | None = None
) -> tuple[Any, ...]:
    """The inputs, their tensors as leaves (on `device`) that require gradients where the given ones
    do.
    """
    if not isinstance(inputs, tuple):
        raise UsageError(f"detach_variable takes a tuple, not a {type(inputs).__name__}")
    return tuple(_leaf(item, device) if isinstance(item, Tensor) else item for item in inputs)


def _leaf(tensor: Tensor, device: torch.device | str | None) -> Tensor:
    placed = tensor if device is None else tensor.to(device)
    return placed.detach().requires_grad_(tensor.requires_grad)


def extract_tensors(
    all_objects: Sequence[Any],
) -> tuple[Sequence[Tensor], Sequence[Any], Sequence[bool]]:
    """(the tensors, all others, which places have tensors): tuples of a tuple, else lists."""
    flags = [isinstance(value, Tensor) for value in all_objects]
    tensors = [value for value in all_objects if isinstance(value, Tensor)]
    others = [value for value in all_objects if not isinstance(value, Tensor)]
    return (
        (tuple(tensors), tuple(others), tuple(flags))
        if isinstance(all_objects, tuple)
        else (tensors, others, flags)
    )


def merge_tensors(
    tensor_objects: Sequence[Tensor],
    non_tensor_objects: Sequence[Any],
    tensor_flags: Sequence[bool],
) -> tuple[Any, ...]:
    """What `extract_tensors` took apart."""
    tensors = iter(tensor_objects)
    others = iter(non_tensor_objects)
    return tuple(next(tensors) if flag else next(others) for flag in tensor_flags)
