"""mpich on hosts in namespaces."""

from __future__ import annotations

import pytest
from ds_testing_hosts.launched_hosts import SshHostsConformance

pytestmark = pytest.mark.hosts


class TestMpich(SshHostsConformance):
    launcher = "mpich"
    programs = ("mpiexec.hydra",)
    tool = "mpiexec.hydra"
