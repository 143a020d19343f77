"""The section ``tensorboard`` (torch-free)."""

from __future__ import annotations

from ds_core.config import option
from ds_core.filemonitor import JobFolder

__all__ = ["TensorBoardConfig"]


class TensorBoardConfig(JobFolder):
    """Where the TensorBoard monitor writes, and whether."""

    enabled: bool = option(False, "Write metrics as TensorBoard event files.")
