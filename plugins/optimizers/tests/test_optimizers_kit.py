"""Every optimizer passes the conformance kit."""

from __future__ import annotations

from ds_optimizers.plugin import OPTIMIZERS
from ds_testing import OptimizerConformance


class TestOptimizers(OptimizerConformance):
    plugin = "ds_optimizers.plugin"
    params = {name: {"lr": 0.01} for name in OPTIMIZERS}
