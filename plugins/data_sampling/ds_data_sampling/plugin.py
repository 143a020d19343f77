"""The section ``data_efficiency``: which samples come when, and in which batches (torch-free)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ds_data_sampling.config import DataEfficiency

__all__ = ["ds_config"]


def ds_config() -> type[DataEfficiency]:
    """The section ``data_efficiency``."""
    from ds_data_sampling.config import DataEfficiency

    return DataEfficiency
