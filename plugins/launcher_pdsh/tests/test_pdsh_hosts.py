"""pdsh on hosts in namespaces."""

from __future__ import annotations

import pytest
from ds_testing.launched_hosts import SshHostsConformance

pytestmark = pytest.mark.hosts


class TestPdsh(SshHostsConformance):
    launcher = "pdsh"
    programs = ("pdsh", "sshd")
    tool = "pdsh"
    secret = False
