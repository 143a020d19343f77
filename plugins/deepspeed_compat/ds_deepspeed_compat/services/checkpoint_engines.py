"""``deepspeed.runtime.checkpoint_engine``: what a program's own engine of files derives from.

The engine's checkpoints are made by the hook ``ds_checkpointer``. This is for programs that have
a class of their own, and use it beside them.
"""

from __future__ import annotations

import importlib
import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass
class CheckpointCommitInfo:
    """A checkpoint: its tag, the folder that it lies in, and whether ``latest`` is to name it."""

    tag: str
    save_dir: str
    save_latest: bool


class CheckpointEngine(ABC):
    """What a program's own engine derives from."""

    def __init__(self, config_params: Any = None) -> None:
        self.name: str | None = None

    @abstractmethod
    def create(self, info: CheckpointCommitInfo) -> None:
        """A checkpoint is about to be saved."""

    @abstractmethod
    def save(self, state_dict: Any, path: str) -> None:
        """Write one file."""

    @abstractmethod
    def load(self, path: str, map_location: Any = None) -> Any:
        """Read one file."""

    @abstractmethod
    def commit(self, info: CheckpointCommitInfo) -> Any:
        """All files are there."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Make a folder."""
        os.makedirs(path, exist_ok=exist_ok)

    def is_data_parallel_writer(self, dp_rank: int) -> bool:
        """Whether this data-parallel rank writes what all have alike."""
        return dp_rank == 0

    def is_decoupled(self) -> bool:
        """Whether files are written while training goes on."""
        return False

    def set_commit_info(self, info: CheckpointCommitInfo) -> None:  # noqa: B027  an engine may leave it as it is
        """Kept by engines that write later."""

    def get_commit_info(self) -> CheckpointCommitInfo | None:
        """What was kept."""
        return None

    def cleanup(self) -> None:  # noqa: B027
        """Release what is held."""

    def preserves_storage_sharing(self) -> bool:
        """Whether tensors that share memory do so in the file."""
        return True


class TorchCheckpointEngine(CheckpointEngine):
    """Files of `torch.save`.

    They are read without running code in them, so `load` takes tensors and plain values.
    """

    def __init__(self, config_params: Any = None) -> None:
        super().__init__(config_params)
        self.name = "TorchCheckpointEngine"

    def create(self, info: CheckpointCommitInfo) -> None:
        """Nothing is to be prepared."""

    def save(self, state_dict: Any, path: str) -> None:
        """Write one file, which has its name once all of it is there (dscore-checkpoint-deepspeed
        writes it).
        """
        importlib.import_module("ds_checkpoint_deepspeed.saving").save(state_dict, Path(path))

    def load(self, path: str, map_location: Any = None) -> Any:
        """What is in a file (dscore-checkpoint-deepspeed reads it), on the device of `map_location`,
        else on the host.
        """
        folder = importlib.import_module("ds_checkpoint_deepspeed.reading.folder")
        found = folder.load(Path(path), kind=object, links=True)
        device = map_location if isinstance(map_location, str | torch.device) else "cpu"
        # What was read is mapped: a copy outlives the file.
        return importlib.import_module("ds_checkpoint").clone_tensors_for_torch_save(
            found, torch.device(device)
        )

    def commit(self, info: CheckpointCommitInfo) -> bool:
        """Files are there as soon as they are saved."""
        return True
