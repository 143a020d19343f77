"""The launcher of this package passes the conformance kit."""

from __future__ import annotations

import pytest
from ds_testing import LauncherConformance


@pytest.mark.fast_cases(
    test_a_module_runs_as_one=(),
    test_one_that_fails_ends_all=(),
    test_nothing_is_left_when_it_is_killed=(),
)
class TestLocal(LauncherConformance):
    load = "ds_cli.local.launcher:launch"
    nodes = (1, 1)  # `dscore run` decides it for this launcher
