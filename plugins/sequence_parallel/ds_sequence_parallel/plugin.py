"""What this distribution offers to ds_core: the section ``sequence_parallel``, its axis (torch-free)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ds_core.entries import Axis
from ds_core.errors import Problem

if TYPE_CHECKING:
    from pydantic import BaseModel

    from ds_core.config import RunConfig

__all__ = ["ds_check", "ds_config", "ds_mesh_axes"]


def ds_config() -> type[BaseModel]:
    """The section ``sequence_parallel``."""
    from ds_sequence_parallel.config import SequenceParallelConfig

    return SequenceParallelConfig


def ds_check(config: RunConfig) -> Iterable[Problem]:
    """The two keys of the size agree."""
    from ds_sequence_parallel.config import SequenceParallelSize, settings

    size, other = settings(config).size, config.section("sequence_parallel_size")
    if size is not None and isinstance(other, SequenceParallelSize) and other.root != size:
        why = f"is {size}, but sequence_parallel_size is {other.root}"
        yield Problem("sequence_parallel.size", why, "give one of the two")


def ds_mesh_axes(config: RunConfig) -> Iterable[Axis]:
    """``sp``, folded inside dp: its ranks hold the same parameters, and work on parts of the same sequences."""
    from ds_sequence_parallel.config import sp_size

    return [Axis("sp", sp_size(config), inside="dp")]
