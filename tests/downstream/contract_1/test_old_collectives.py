"""old-collectives against the contracts of plugins and collectives."""

from __future__ import annotations

from ds_testing import CollectivesConformance, PluginConformance


class TestPlugin(PluginConformance):
    entry_point = "old_collectives.plugin"


class TestCollectives(CollectivesConformance):
    """thresholds: bytes at which it changes what it does."""

    provider = "old_collectives.collectives:OldCollectives"
    polls = False
    ranks = (2,)
    thresholds = (65536,)
