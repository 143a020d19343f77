"""old-checkpointer against the contracts of plugins and checkpointers."""

from __future__ import annotations

import pytest
from ds_testing import CheckpointerConformance, PluginConformance


class TestPlugin(PluginConformance):
    entry_point = "old_checkpointer.plugin"
    section = "old_checkpointer"
    good_config = {}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
class TestCheckpointer(CheckpointerConformance):
    config = {"old_checkpointer": {}}
