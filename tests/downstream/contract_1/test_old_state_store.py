"""old-state-store against the contracts of plugins and state stores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from ds_testing import PluginConformance, StateStoreConformance
from old_state_store.store import OldStateStore


class TestPlugin(PluginConformance):
    entry_point = "old_state_store.plugin"


class TestStore(StateStoreConformance):
    def make_store(self, ctx: Any, tmp_path: Path) -> OldStateStore:
        return OldStateStore(ctx, {})

    def test_nothing_is_kept_of_what_is_discarded(self, tmp_path: Path) -> None:
        store = self.store(tmp_path)
        tensor = torch.arange(6.0)
        store.evict([tensor])
        store.fetch([tensor])
        assert tensor.tolist() == [0, 1, 2, 3, 4, 5]
        store.discard([tensor])
        assert isinstance(store, OldStateStore)
        assert not store.kept
