"""The store that ZeRO's tests offload to is itself one that may be offloaded to."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ds_state_stores import StateStore
from ds_testing import StateStoreConformance

from plugins.zero.tests.disk_store import DiskStore


class TestDiskStore(StateStoreConformance):
    def make_store(self, ctx: Any, tmp_path: Path) -> StateStore:
        ctx.config = SimpleNamespace(section=lambda name: SimpleNamespace(path=tmp_path))
        return DiskStore(ctx, {})
