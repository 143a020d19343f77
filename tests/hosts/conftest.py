"""Three hosts with OpenSSH for all tests of this folder, and what every launcher has to equal:
ranks on one host.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ds_testing_hosts.lab import Lab, unavailable
from sites import CASES, LIMIT, QUICKSTART, Site


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Hosts a, b and c, and head, for runs that disturb nothing."""
    if reason := unavailable():
        pytest.skip(reason)
    shared = tmp_path_factory.mktemp("shared")
    with Lab("a", "b", "c", ssh=True, shared=[shared]) as lab:
        yield Site(lab, shared)


@pytest.fixture(scope="session")
def one_host(site: Site) -> Path:
    """Where the quickstart and the cases ran on four ranks of one host."""
    folder = site.shared / "one"
    folder.mkdir()
    run = [sys.executable, "-m", "ds_cli", "run", "--nproc", "4"]
    site.lab.head.run([*run, QUICKSTART, "--stop-after", "4"], cwd=folder, timeout=LIMIT)
    site.lab.head.run(
        [*run, CASES, str(folder / "cases.json"), str(folder), "0", "8"], cwd=folder, timeout=LIMIT
    )
    return folder
