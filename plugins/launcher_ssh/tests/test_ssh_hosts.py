"""dscore-launcher-ssh on hosts with real ssh servers."""

from __future__ import annotations

import pytest
from ds_testing_hosts.launched_hosts import SshHostsConformance


@pytest.mark.hosts
class TestSsh(SshHostsConformance):
    launcher = "ssh"
    tool = "ssh"
    programs = ("ssh", "sshd")
