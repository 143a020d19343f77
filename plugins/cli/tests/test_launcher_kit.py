"""The launcher of this package passes the conformance kit."""

from __future__ import annotations

from ds_testing import LauncherConformance


class TestLocal(LauncherConformance):
    load = "ds_cli.local.launcher:launch"
    nodes = (1, 1)  # `dscore run` decides it for this launcher
