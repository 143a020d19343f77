"""openmpi on hosts in namespaces."""

from __future__ import annotations

import pytest
from ds_testing_hosts.launched_hosts import SshHostsConformance

pytestmark = pytest.mark.hosts


class TestOpenMpi(SshHostsConformance):
    launcher = "openmpi"
    programs = ("mpirun.openmpi",)
    more = ("--launcher-args=--allow-run-as-root",)
    tool = "mpirun.openmpi"
