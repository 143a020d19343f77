"""The quickstart on two nodes of a Ray cluster has the losses of four ranks on one host."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from ds_testing_hosts.lab import Lab
from ds_testing_hosts.ray_hosts import start_ray
from sites import LIMIT, QUICKSTART, quickstart_losses

pytestmark = [
    pytest.mark.hosts,
    pytest.mark.skipif(
        find_spec("ray") is None, reason="ray is not installed; make test-hosts brings it"
    ),
]


def test_quickstart(one_host: Path, tmp_path: Path) -> None:
    with Lab("a", "b", shared=[tmp_path]) as lab:
        start_ray(lab, tmp_path)
        run = [
            sys.executable,
            "-m",
            "ds_cli",
            "run",
            "--launcher",
            "ray",
            "--nnodes",
            "2",
            "--nproc",
            "2",
        ]
        lab.head.run([*run, QUICKSTART, "--stop-after", "4"], cwd=tmp_path, timeout=LIMIT)
    assert quickstart_losses(tmp_path) == quickstart_losses(one_host)
