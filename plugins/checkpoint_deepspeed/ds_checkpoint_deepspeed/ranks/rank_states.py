"""The files of a checkpoint of DeepSpeed's by their names, and putting together what several of
them hold.

Under the names of ``deepspeed.checkpoint.reshape_utils``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from ds_checkpoint_deepspeed.ranks.state_files import naturally
from ds_core.errors import CheckpointError

Row = TypeVar("Row")


def basic_folder_validation(dir: str | os.PathLike[str]) -> None:
    """Raises CheckpointError unless it is a folder."""
    if not os.path.isdir(dir):
        raise CheckpointError(f"{dir} is no folder")


def get_files(dir: str | os.PathLike[str]) -> list[str]:
    """The paths of all files in a folder and below it."""
    return [os.path.join(root, name) for root, _, names in os.walk(dir) for name in names]


def get_files_with_prefix(all_files: Sequence[str], prefix: str) -> list[str]:
    """Those whose names begin so, by their paths; rank 100 comes after rank 11."""
    found = [path for path in all_files if os.path.basename(path).startswith(prefix)]
    return sorted(found, key=lambda path: naturally(Path(path)))


def get_zero_files(dir: str | os.PathLike[str]) -> list[str]:
    """The files of optimizer states by data-parallel rank, then by model-parallel rank."""
    files = [path for path in get_files(dir) if path.endswith("_optim_states.pt")]
    for prefix in ("zero_pp_rank_", "fp16_zero_pp_rank_", "bf16_zero_pp_rank_"):
        if found := get_files_with_prefix(files, prefix):
            return sort_zero_files(found, prefix)
    return []


def sort_zero_files(files: Sequence[str], prefix: str) -> list[str]:
    """By the numbers of their ranks: 10 comes after 2.

    Raises ValueError for a name without them.
    """

    def ranks(path: str) -> tuple[int, int]:
        found = re.search(rf"{prefix}(\d+)_mp_rank_(\d+)", os.path.basename(path))
        if found is None:
            raise ValueError(f"{path} names no data-parallel and model-parallel rank")
        return int(found[1]), int(found[2])

    return sorted(files, key=ranks)


def validate_files(file_list: Sequence[str]) -> None:
    """Print the files that are not there."""
    for path in file_list:
        if not os.path.isfile(path):
            print(f"{path} does not exist")


def partition_data(data_list: Sequence[Row], num_partitions: int) -> list[list[Row]]:
    """The list in so many equal parts. Raises CheckpointError where it cannot be divided."""
    size, rest = divmod(len(data_list), num_partitions)
    if rest:
        raise CheckpointError(
            f"{len(data_list)} parts cannot be shared by {num_partitions} ranks equally"
        )
    return [list(data_list[part * size : (part + 1) * size]) for part in range(num_partitions)]


def merge_state(state_a: Any, state_b: Any, key_list: Sequence[str] = ()) -> Any:
    """Tensors one after the other, in dicts, lists and tuples too; of other values the first.

    Keys are those of the second. Raises ValueError for values of different kinds.
    """
    if type(state_a) is not type(state_b):
        where = ".".join(key_list) or "the states"
        raise ValueError(
            f"{where}: a {type(state_a).__name__} and a {type(state_b).__name__} cannot be put "
            "together"
        )
    if isinstance(state_a, dict):
        return merge_state_dict(state_a, state_b, key_list)
    if isinstance(state_a, list | tuple):
        return type(state_a)(merge_state_list(state_a, state_b, key_list))
    # A number, such as the step of an optimizer, has no dimension: all ranks have the same.
    return (
        torch.cat([state_a, state_b]) if isinstance(state_a, Tensor) and state_a.dim() else state_a
    )


def merge_state_dict(
    dict_a: dict[Any, Any], dict_b: dict[Any, Any], key_list: Sequence[str]
) -> dict[Any, Any]:
    """`merge_state` of each key of the second; what the first has not is taken as it is."""
    merged = type(dict_a)()
    for key, value in dict_b.items():
        merged[key] = (
            merge_state(dict_a[key], value, [*key_list, str(key)]) if key in dict_a else value
        )
    return merged


def merge_state_list(
    list_a: Sequence[Any], list_b: Sequence[Any], key_list: Sequence[str]
) -> list[Any]:
    """`merge_state` of each pair. Raises ValueError for lists of different lengths."""
    if len(list_a) != len(list_b):
        raise ValueError(
            f"{'.'.join(key_list)}: lists of {len(list_a)} and {len(list_b)} cannot be put together"
        )
    return [merge_state(a, b, key_list) for a, b in zip(list_a, list_b, strict=True)]
