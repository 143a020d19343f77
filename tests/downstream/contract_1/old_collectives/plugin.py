"""The declaration of old-collectives: a provider of collectives (torch-free)."""

from __future__ import annotations

from collections.abc import Mapping

from ds_core.entries import CollectivesEntry


def ds_collectives() -> Mapping[str, CollectivesEntry]:
    """It serves the groups of one backend, for tensors on one device type; below 0 it must be asked for."""
    return {
        "old_collectives": CollectivesEntry(
            "old_collectives.collectives:OldCollectives",
            device="cpu",
            backend="gloo",
            priority=-1,
        )
    }
