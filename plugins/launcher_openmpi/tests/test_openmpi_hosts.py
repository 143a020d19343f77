"""openmpi on hosts in namespaces."""

from __future__ import annotations

import signal

import pytest
from ds_testing.launched_hosts import SshHostsConformance

pytestmark = pytest.mark.hosts


class TestOpenMpi(SshHostsConformance):
    launcher = "openmpi"
    programs = ("mpirun.openmpi",)
    more = ("--launcher-args=--allow-run-as-root",)
    tool = "mpirun.openmpi"
    preempted = 128 + signal.SIGTERM  # mpirun waits 3 s, not as long as the ranks need
