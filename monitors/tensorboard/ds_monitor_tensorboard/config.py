"""The section ``tensorboard`` (torch-free)."""

from __future__ import annotations

from ds_monitor_kit import JobFolder

from ds_core.config import option


class TensorBoardConfig(JobFolder):
    """Where the TensorBoard monitor writes, and whether."""

    enabled: bool = option(False, "Write metrics as TensorBoard event files.")
