"""The declaration of old-state-store: a state store (torch-free)."""

from __future__ import annotations

from collections.abc import Mapping

from ds_core.entries import StateStoreEntry


def ds_state_stores() -> Mapping[str, StateStoreEntry]:
    """Chosen by the name in the ``device`` of an offload section."""
    return {
        "old_state_store": StateStoreEntry(
            load="old_state_store.store:OldStateStore",
        )
    }
