"""What an engine has to save and load checkpoints. A checkpointer does the work; it is found at the first use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ds_core.running import RunningEngine

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ds_core.checkpointer import Checkpointer

__all__ = ["ResumableEngine"]


class ResumableEngine(RunningEngine):
    """An engine's methods for checkpoints, under their documented names."""

    _checkpointer: Checkpointer | None = None
    _unannounced: tuple[str, str] | None = None  # folder and tag of a checkpoint that observers have not heard of

    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save all that a resumed run needs to ``save_dir/tag``. Every rank calls it.

        tag: default ``global_step{N}``. client_state: rank 0's values are kept, and given back by `load_checkpoint`.
        save_latest: a load without a tag takes this one. exclude_frozen_parameters: leave out weights that do not
        require gradients. UsageError where no checkpointer is installed; CheckpointError, on all ranks, when it fails.
        """
        from ds_core.checkpointer import SaveOptions

        self._announce_saved()
        name = f"global_step{self.global_steps}" if tag is None else tag
        options, checkpointer = SaveOptions(name, client_state, save_latest, exclude_frozen_parameters), self._find()
        checkpointer.save(self, save_dir, options)
        if self.telemetry.observes("ds_checkpoint_saved"):
            self._unannounced = str(save_dir), name
            if not checkpointer.saving:
                self._announce_saved()
        return True

    def _announce_saved(self) -> None:
        """Tell observers of the last checkpoint, if they have not heard of it, once it is durable."""
        if (saved := self._unannounced) is not None:
            self._unannounced = None
            self._find().wait()
            self.telemetry.notify("ds_checkpoint_saved", folder=saved[0], tag=saved[1])

    def _find(self) -> Checkpointer:
        if self._checkpointer is None:
            from ds_core.checkpointer import find_checkpointer

            self._checkpointer = find_checkpointer(self.ctx)
        return self._checkpointer

    def load_checkpoint(
        self,
        load_dir: str,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[[dict[str, Tensor], nn.Module], None] | None = None,
        missing_ok: bool = False,
        fallback: bool = False,
    ) -> tuple[str | None, Any]:
        """Read a checkpoint, saved at any world size; returns (path, client_state). Every rank calls it.

        Without a tag and without a file ``latest``: (None, None) and a warning, or (None, {}) with missing_ok.
        fallback: when it is damaged, take the newest that is not. The rest: `ds_core.checkpointer.LoadOptions`.
        """
        from ds_core.checkpointer import LoadOptions

        options = LoadOptions(
            tag=tag,
            strict=load_module_strict,
            optimizer=load_optimizer_states,
            scheduler=load_lr_scheduler_states,
            module_only=load_module_only,
            custom=custom_load_fn,
            missing_ok=missing_ok,
            fallback=fallback,
        )
        self._announce_saved()
        path, client_state = self._find().load(self, load_dir, options)
        if path is not None:
            self.telemetry.notify("ds_checkpoint_loaded", path=path)
        return path, client_state

    def wait_for_checkpoint(self) -> None:
        """Return when the save under way, if any, is durable; raises what went wrong with it. Every rank calls it."""
        self._announce_saved()
        if self._checkpointer is not None:
            self._checkpointer.wait()

    def save_16bit_model(
        self, save_dir: str, save_filename: str = "model.safetensors", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Write the whole model's 16-bit weights as one safetensors file on rank 0; whether it did. Collective."""
        export = self._find().export
        return export(self, save_dir, save_filename, exclude_frozen_parameters)

    def close_checkpointer(self) -> None:
        """Wait for a save under way, and release what it holds."""
        try:
            self._announce_saved()
        finally:
            if self._checkpointer is not None:
                self._checkpointer.close()
