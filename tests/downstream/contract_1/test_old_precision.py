"""old-precision against the contracts of plugins and precision modes."""

from __future__ import annotations

from ds_testing import PluginConformance, PrecisionConformance


class TestPlugin(PluginConformance):
    entry_point = "old_precision.plugin"
    section = "old_precision"
    good_config = {"bits": 4}
    bad_configs = ({"bits": 1},)


class TestPrecision(PrecisionConformance):
    """A sum in another order may be rounded to another value."""

    config = {"old_precision": {}}
    tolerance = 0.02
    gas = (2,)
