"""Declares the state store ``nvme`` (torch-free)."""

from __future__ import annotations

from collections.abc import Mapping

from ds_core.entries import StateStoreEntry

__all__ = ["ds_state_stores"]


def ds_state_stores() -> Mapping[str, StateStoreEntry]:
    """Files in the folder ``nvme_path``."""
    return {"nvme": StateStoreEntry("ds_nvme.store:NvmeStore")}
