"""What this package offers: the state store ``cpu``."""

from __future__ import annotations

from collections.abc import Mapping

from ds_core.entries import StateStoreEntry


def ds_state_stores() -> Mapping[str, StateStoreEntry]:
    """The host's memory."""
    return {"cpu": StateStoreEntry("ds_state_stores.stores:HostStore")}
