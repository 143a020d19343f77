"""Declares the provider ``composed`` (torch-free): collectives on CPU tensors in groups of backend
gloo.
"""

from __future__ import annotations

from collections.abc import Mapping

from ds_core.entries import CollectivesEntry


def ds_collectives() -> Mapping[str, CollectivesEntry]:
    """``composed``, priority 0."""
    return {
        "composed": CollectivesEntry(
            "ds_comm_gloo.provider:GlooCollectives", device="cpu", backend="gloo"
        )
    }
