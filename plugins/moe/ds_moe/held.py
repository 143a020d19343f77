"""Where transforms note which parameters, under names of their own, ranks along ``ep`` do not share (torch-free)."""

from __future__ import annotations

from collections.abc import Collection

from ds_core.stash import StashKey

__all__ = ["HELD"]

HELD: StashKey[Collection[str]] = StashKey("parameters and buffers that differ over ep")
"""Names of parameters and buffers that only some ranks along ``ep`` have; slices (`ds_core.slices`) are not named."""
