"""The config section ``checkpoint_peer`` (torch-free)."""

from __future__ import annotations

from ds_core.config import Section, option

MEMORY = "checkpoint_peer:memory"
"""What the plugin asks the engine to save into; no folder of a disk."""


class PeerConfig(Section):
    """Copies of the run's states in the memory of its hosts."""

    folder: str = option(
        ...,
        "The folder of checkpoints that memory stands for: engine.load_checkpoint(folder) takes "
        "the newest set in memory where that is newer than the folder's latest.",
        min_length=1,
    )
    every: int = option(10, "Steps from one set in memory to the next.", ge=1)
    neighbours: int = option(
        1, "How many other hosts have a copy of each host's files; 0: none.", ge=0
    )
    max_bytes: int | None = option(
        None,
        "The most bytes of memory that a host gives to sets, its own and its neighbours' (two sets "
        "of both); null: what /dev/shm has.",
        ge=1,
    )
    max_bytes_per_second: int | None = option(
        None, "The most bytes per second that a host sends to a neighbour; null: no limit.", ge=1
    )
    memory: str = option("/dev/shm", "A folder in the memory of each host (tmpfs).", min_length=1)
