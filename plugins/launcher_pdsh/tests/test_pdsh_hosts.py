"""pdsh on hosts in namespaces."""

from __future__ import annotations

import signal

import pytest
from ds_testing_hosts.launched_hosts import SshHostsConformance

pytestmark = pytest.mark.hosts


class TestPdsh(SshHostsConformance):
    launcher = "pdsh"
    programs = ("pdsh", "sshd")
    tool = "pdsh"
    secret = False
    preempted = 128 + signal.SIGTERM  # pdsh passes no signal on, and does not wait
