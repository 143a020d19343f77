"""old-check against the contracts of plugins and checks."""

from __future__ import annotations

from ds_testing import CheckConformance, PluginConformance

SGD = {"type": "SGD", "params": {"lr": 0.05}}
STEEP = {"type": "SGD", "params": {"lr": 0.5}}


class TestPlugin(PluginConformance):
    entry_point = "old_check.plugin"
    section = "old_check"
    good_config = {"steepest": 0.5}
    bad_configs = ({"steepest": 0},)


class TestCheck(CheckConformance):
    """For each config, the keys in which something is wrong."""

    cases = (
        ({"old_check": {}, "gradient_clipping": 1.0, "optimizer": SGD}, ()),
        ({"old_check": {}, "gradient_clipping": 0.0, "optimizer": SGD}, ("gradient_clipping",)),
        ({"old_check": {}, "gradient_clipping": 1.0, "optimizer": STEEP}, ("optimizer.params.lr",)),
    )
