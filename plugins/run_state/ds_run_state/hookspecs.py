"""The hook of dscore-run-state (torch-free)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ds_core.plugins import checks

if TYPE_CHECKING:
    from ds_core.context import Context


@checks.gives(checks.named(("state_dict", "load_state_dict")))
def ds_checkpointables(ctx: Context) -> Mapping[str, Any]:  # type: ignore[empty-body]
    """Hook: objects with ``state_dict()`` and ``load_state_dict()`` to keep in every checkpoint, by
    name.

    A state is JSON plus tensors; names are prefixed with the plugin's name. Every rank.
    """
