"""The hook of dscore-state-stores (torch-free)."""

from __future__ import annotations

from collections.abc import Mapping

from ds_core import entries
from ds_core.plugins import checks


@checks.gives(checks.named("ds_core.entries:StateStoreEntry"))
def ds_state_stores() -> Mapping[str, entries.StateStoreEntry]:  # type: ignore[empty-body]
    """Driver, by the name in the ``device`` of an offload section (case-insensitive): where states
    can rest.
    """
