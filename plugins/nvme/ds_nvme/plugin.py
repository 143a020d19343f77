"""Declares the state store ``nvme`` and the command ``dscore io`` (torch-free)."""

from __future__ import annotations

from collections.abc import Mapping

from ds_core.entries import CommandEntry, StateStoreEntry


def ds_commands() -> Mapping[str, CommandEntry]:
    """``dscore io``."""
    return {
        "io": CommandEntry(
            "ds_nvme.command:app", "Measure a disk, and find the settings of aio for it."
        )
    }


def ds_state_stores() -> Mapping[str, StateStoreEntry]:
    """Files in the folder ``nvme_path``."""
    return {"nvme": StateStoreEntry("ds_nvme.store:NvmeStore")}
