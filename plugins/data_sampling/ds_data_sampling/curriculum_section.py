"""The section ``curriculum_learning``: a length of sequences that grows with the steps (torch-free)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ds_data_sampling.config import LegacyCurriculum

__all__ = ["ds_config"]


def ds_config() -> type[LegacyCurriculum]:
    """The section ``curriculum_learning``."""
    from ds_data_sampling.config import LegacyCurriculum

    return LegacyCurriculum
