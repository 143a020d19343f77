"""Declares the state store ``nvme`` (torch-free)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ds_core.entries import StateStoreEntry

if TYPE_CHECKING:
    from ds_core.context import Context

__all__ = ["ds_close", "ds_state_stores"]


def ds_state_stores() -> Mapping[str, StateStoreEntry]:
    """Files in the folder ``nvme_path``."""
    return {"nvme": StateStoreEntry("ds_nvme.store:NvmeStore")}


def ds_close(ctx: Context) -> None:
    """Remove the run's files."""
    from ds_nvme.store import close_stores

    close_stores(ctx)
