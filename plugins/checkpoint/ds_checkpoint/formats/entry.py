"""`FormatEntry`: what the hook ``ds_checkpoint_formats`` gives (torch-free)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ds_core.entries import Ref


@dataclass(frozen=True, slots=True)
class FormatEntry:
    """A format of checkpoints of another program."""

    load: Ref
    """A subclass of `ds_checkpoint.formats.foreign.CheckpointFormat`, which is called without
    arguments.
    """
    carries: str
    """What the format has a place for, in a few words: "weights", "weights, optimizer states"."""
