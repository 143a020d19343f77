"""ds-launcher-ssh passes the conformance kit on hosts with real ssh servers."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ds_testing import LauncherConformance
from ds_testing.hosts import Lab


@pytest.mark.hosts
class TestSsh(LauncherConformance):
    load = "ds_launcher_ssh.ssh:launch"
    hosts = ("b", "a")  # their order is the hostfile's
    master_addr = ""

    @pytest.fixture(autouse=True)
    def _on_hosts(self, lab: Callable[..., Lab], tmp_path: Path) -> None:
        self.lab = lab("a", "b", ssh=True, shared=[tmp_path])

    def popen(self, command: list[str], **options: Any) -> subprocess.Popen[Any]:
        return self.lab.head.popen(command, **options)
