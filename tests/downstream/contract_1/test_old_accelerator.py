"""old-accelerator against the contracts of plugins and accelerators."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from ds_testing import AcceleratorConformance, PluginConformance
from old_accelerator.device import OldAccelerator

from ds_core.accelerator import Accelerator


class TestPlugin(PluginConformance):
    entry_point = "old_accelerator.plugin"


class TestDevice(AcceleratorConformance):
    resets_peak = False  # the system keeps it

    def accelerator_factory(self) -> Accelerator:
        return OldAccelerator()


@pytest.mark.parametrize(("value", "found"), [("1", True), ("", False)])
def test_it_is_found_by_its_probe(value: str, found: bool) -> None:
    code = "import ds_core; print(ds_core.get_accelerator().name)"
    env = {**os.environ, "OLD_ACCELERATOR": value}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert (done.stdout.strip() == "old_accelerator") is found
