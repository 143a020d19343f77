"""Small functions on tensors and parameters that training loops take from
``deepspeed.runtime.utils``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ds_core import comm
from ds_core.accelerator import get_accelerator
from ds_core.errors import UsageError


@dataclass
class fragment_address:
    """Where a part of a parameter lies in a flat tensor."""

    numel: int
    start: int


def prefix_sum_inc(weights: Iterable[float]) -> list[float]:
    """The sums up to each weight and with it."""
    return list(itertools.accumulate(weights))


def get_only_unique_item(items: Iterable[Any]) -> Any:
    """The value that all items have. Raises UsageError where they differ."""
    found = set(items)
    if len(found) != 1:
        raise UsageError(f"one value was expected, not {sorted(map(str, found))}")
    return found.pop()


def get_tensor_bytes(item: Any) -> int:
    """Bytes of the tensors in lists, tuples and dicts."""
    if isinstance(item, Tensor):
        return item.nbytes
    values = (
        item.values() if isinstance(item, dict) else item if isinstance(item, list | tuple) else ()
    )
    return sum(get_tensor_bytes(value) for value in values)


def get_ma_status() -> int:
    """Bytes of the accelerator's memory in use; 0 on other ranks than the first."""
    return 0 if comm.is_initialized() and comm.rank() else get_accelerator().memory_allocated()


def is_optimized_parameter(param: Any) -> bool:
    """Whether it is trained and has elements, those that other ranks hold too."""
    return bool(param.requires_grad) and getattr(param, "ds_numel", param.numel()) > 0


def filter_empty_parameters(params: Any) -> Any:
    """Parameters, or groups of them, without those that have no element; groups that are left empty
    are dropped.
    """
    if not isinstance(params, list | tuple) or not params:
        return params
    if not isinstance(params[0], dict):
        return [param for param in params if param.numel()]
    groups = [
        {**group, "params": filter_empty_parameters(list(group["params"]))} for group in params
    ]
    return [group for group in groups if group["params"]]


def align_dense_tensors(tensor_list: Sequence[Tensor], alignment: int) -> list[Tensor]:
    """The tensors, and one of zeros that fills their elements up to a multiple of `alignment`."""
    missing = -sum(tensor.numel() for tensor in tensor_list) % alignment
    return [*tensor_list, *([tensor_list[0].new_zeros(missing)] if missing else [])]


def all_gather_into_tensor_dp_groups(
    groups_flat: Sequence[Tensor],
    partitioned_param_groups: Sequence[Sequence[Tensor]],
    dp_process_group: Sequence[Any],
) -> None:
    """Fill each flat tensor with the parts that its group's ranks hold. Collective.

    partitioned_param_groups: for each flat tensor its equal parts, of which this rank's is read.
    """
    for flat, parts, group in zip(
        groups_flat, partitioned_param_groups, dp_process_group, strict=True
    ):
        if comm.world_size(group) > 1:
            # The part may be a view of the flat tensor, which the gather writes.
            comm.all_gather_into_tensor(flat, parts[comm.rank(group)].clone(), group=group)


def all_gather_dp_groups(
    groups_flat: Sequence[Tensor],
    partitioned_param_groups: Sequence[Sequence[Tensor]],
    dp_process_group: Sequence[Any],
    start_alignment_factor: int,
    allgather_bucket_size: int,
) -> None:
    """`all_gather_into_tensor_dp_groups`: one collective for each group, whatever the bucket's
    size.
    """
    all_gather_into_tensor_dp_groups(groups_flat, partitioned_param_groups, dp_process_group)
