"""Slurm on hosts in namespaces; no ssh runs on them."""

from __future__ import annotations

from pathlib import Path

import pytest
from ds_testing_hosts.clusters import no_slurm, start_slurm
from ds_testing_hosts.lab import Lab
from ds_testing_hosts.launched_hosts import HostsConformance

pytestmark = pytest.mark.hosts


class TestSlurm(HostsConformance):
    launcher = "slurm"
    tool = "srun"

    @classmethod
    def prepare(cls, lab: Lab, folder: Path) -> tuple[list[str], dict[str, str]]:
        if reason := no_slurm():
            pytest.skip(reason)
        slurm = start_slurm(lab, folder)
        return ["salloc", "-Q", "-N", "3"], dict(slurm.environment)

    def first_host(self) -> str:
        return "a"  # the allocation's order, not the hostfile's
