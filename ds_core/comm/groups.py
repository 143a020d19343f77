"""The group of one rank, which needs no torch process group."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class _Alone:
    def __repr__(self) -> str:
        return "ALONE"


ALONE = cast("ProcessGroup", _Alone())
"""The group of this rank alone, over which collectives do nothing. (None means all ranks.)"""
