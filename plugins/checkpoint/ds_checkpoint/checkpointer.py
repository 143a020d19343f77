"""`FolderCheckpointer`: checkpoints as folders of safetensors files with a manifest, see
docs/checkpoint-format.md.
"""

from __future__ import annotations

from ds_run_state import RunState

from ds_checkpoint.background import Background
from ds_checkpoint.config import CheckpointConfig
from ds_checkpoint.export import save_16bit_model
from ds_checkpoint.loading import load
from ds_checkpoint.saving import save
from ds_checkpoint.storages.finding import Storages
from ds_core.context import Context
from ds_core.engine import Checkpointer, Folder, Loaded, LoadOptions, RunningEngine, SaveOptions


class FolderCheckpointer(Checkpointer):
    """Saves and loads unless the config names another; its section is ``checkpoint``."""

    def __init__(self, ctx: Context) -> None:
        self._config = ctx.config.section(CheckpointConfig) or CheckpointConfig()
        self._background = Background(ctx.accelerator)
        self._storages = Storages(ctx)

    @property
    def saving(self) -> bool:
        """See `Checkpointer`."""
        return self._background.under_way

    def save(self, engine: RunningEngine, folder: Folder, options: SaveOptions) -> None:
        """See `Checkpointer`.

        With ``checkpoint.async`` it returns when the states are copied to host memory.
        """
        save(RunState(engine), folder, options, self._config, self._storages, self._background)

    def load(self, engine: RunningEngine, folder: Folder, options: LoadOptions) -> Loaded:
        """See `Checkpointer`.

        The world size, ZeRO stage and offload may be others than when it was saved.
        """
        self.wait()
        local = self._config.use_node_local_storage
        verify = self._config.verify
        return load(
            RunState(engine), folder, options, self._storages, verify=verify, node_local=local
        )

    def export(
        self, engine: RunningEngine, folder: Folder, filename: str, exclude_frozen_parameters: bool
    ) -> bool:
        """See `Checkpointer`. The file is safetensors."""
        return save_16bit_model(RunState(engine), folder, filename, exclude_frozen_parameters)

    def wait(self) -> None:
        """See `Checkpointer`."""
        self._background.wait()

    def close(self) -> None:
        """Wait for a save under way, and let other jobs have what it was saved into. Collective."""
        try:
            self.wait()
        finally:
            self._storages.close()
