"""The contract of what saves and loads checkpoints.

A checkpointer is given the engine; it decides where and in which format what there is to save is
kept.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ds_core.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ds_core.engine import RunningEngine

Folder = str | os.PathLike[str]
Loaded = tuple[str | None, dict[str, Any] | None]


@dataclass(frozen=True, slots=True)
class SaveOptions:
    """The arguments of ``engine.save_checkpoint`` except the folder, described there."""

    tag: str
    client_state: Mapping[str, Any] | None = None
    save_latest: bool = True
    exclude_frozen_parameters: bool = False


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """The arguments of ``engine.load_checkpoint`` except the folder."""

    # The subfolder; None: the checkpoint that was saved last with `save_latest`.
    tag: str | None = None
    # Weights that only the model or only the checkpoint has are an error.
    strict: bool = True
    # Load the optimizer's states, its hyperparameters and the loss scaler.
    optimizer: bool = True
    # Load the schedule.
    scheduler: bool = True
    # Load weights and buffers, nothing else.
    module_only: bool = False
    # Loads the weights itself, from the unsharded module tensors (CPU, by name) into the module.
    custom: Callable[[dict[str, Tensor], nn.Module], None] | None = None
    # Do not warn when there is no checkpoint.
    missing_ok: bool = False
    # If the checkpoint cannot be loaded, load the newest one that can.
    fallback: bool = False


class Checkpointer(ABC):
    """Saves and loads the state of one engine, for as long as the engine lives.

    Every method is collective: all ranks call it with the same folder, in the same order. When it
    fails on one rank it must raise `CheckpointError` on all of them. What was saved before must
    then still be loadable, and a load must not have changed the run. An option that is not
    supported must raise `UsageError`.
    """

    @property
    def saving(self) -> bool:
        """Whether the last save is still in progress, until `wait`. The same on all ranks."""
        return False

    @abstractmethod
    def save(self, engine: RunningEngine, folder: Folder, options: SaveOptions) -> None:
        """Save all that a resumed run needs below `folder`.

        It may continue after this has returned, until `wait`.
        """

    @abstractmethod
    def load(self, engine: RunningEngine, folder: Folder, options: LoadOptions) -> Loaded:
        """Load a checkpoint below `folder` into `engine`; returns (its path, client state).

        (None, None) where none was saved and no tag is given; (None, {}) with ``missing_ok``.
        """

    def export(
        self, engine: RunningEngine, folder: Folder, filename: str, exclude_frozen_parameters: bool
    ) -> bool:
        """Write the unsharded 16-bit weights to one file ``folder/filename``; whether it did."""
        raise UsageError(
            f"{type(self).__name__} does not write a 16-bit model; use another checkpointer for it"
        )

    def wait(self) -> None:  # noqa: B027
        """Return when the save under way is durable; raises what went wrong with it."""

    def close(self) -> None:
        """The engine is being destroyed: finish, and release what other jobs may want (locks,
        connections).
        """
        self.wait()
