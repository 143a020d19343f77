"""Check that the ranks of a group work on the same samples, in the first steps.

Nothing else would show it: the losses would be wrong without an error.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ds_core import comm
from ds_core.errors import UsageError
from ds_core.nested import map_leaves
from ds_tensor_parallel.layers.random_regions import drops

if TYPE_CHECKING:
    from ds_core.accelerator import Accelerator
    from ds_tensor_parallel.layers.linear import Place

CHECKED = 3
"""Forwards in training mode whose inputs are compared."""
_RANDOM = "the random state"


def compare_inputs(model: nn.Module, accelerator: Accelerator, place: Place) -> None:
    """UsageError on all ranks of the group where the first forwards of `model` are given other
    inputs on one of them.

    With dropout in the model the random state must be alike, too. A forward that torch.compile
    traces compares nothing: that would break its graph.
    """
    left = CHECKED
    random = drops(model)

    def compare(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal left
        if torch.compiler.is_compiling() or not module.training or not torch.is_grad_enabled():
            return
        left -= 1
        if left == 0:
            handle.remove()
        mine = {name: _digest(value) for name, value in _tensors(args, kwargs)}
        if random:
            mine[_RANDOM] = _digest(accelerator.get_rng_state())
        # Checksums, not values: the message stays small, and every rank finds the same difference.
        found = comm.all_gather_json(mine, group=place.group)
        for rank, other in enumerate(found):
            if names := sorted(
                n for n in found[0].keys() | other.keys() if found[0].get(n) != other.get(n)
            ):
                raise UsageError(_message(names, rank))

    handle = model.register_forward_pre_hook(compare, with_kwargs=True)


def _message(names: list[str], rank: int) -> str:
    if names == [_RANDOM]:
        return (
            f"tensor-parallel rank {rank} has another random state than rank 0, so dropout would "
            "make them differ; after initialize call torch.manual_seed with one seed for all ranks "
            "of the group, or not at all"
        )
    shown = ", ".join(n for n in names if n != _RANDOM)
    return (
        f"tensor-parallel ranks 0 and {rank} are given different inputs: {shown}; ranks of one "
        "group divide layers and must work on the same samples. Give the dataset to initialize, "
        "or divide it by engine.ctx.mesh.index('batch') of mesh.size('batch'), not by the global rank"
    )


def _tensors(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a call and what to call them."""
    for name, value in [*((f"argument {i}", a) for i, a in enumerate(args)), *kwargs.items()]:
        found: list[Any] = []
        map_leaves(found.append, value)
        for number, leaf in enumerate(found):
            if isinstance(leaf, Tensor) and not leaf.is_meta:
                yield name if leaf is value else f"{name} ({number})", leaf


def _digest(value: Tensor) -> list[Any]:
    """Shape, dtype and a checksum of the bytes."""
    flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return [list(value.shape), str(value.dtype), zlib.crc32(flat.numpy().tobytes())]
