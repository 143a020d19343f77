"""A Ray cluster on the hosts of a `ds_testing_hosts.lab.Lab`: each host a node, the lab's head too,
which takes no work.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ds_testing_hosts.lab import Host, Lab

PORT = 6379
NODES = """
import logging, ray, sys
ray.init(address="auto", log_to_driver=False, logging_level=logging.ERROR)
sys.exit(sum(node["Alive"] for node in ray.nodes()) != int(sys.argv[1]))
"""


def start_ray(
    lab: Lab, folder: Path, *, cpus: int = 2, options: Sequence[str] = (), timeout: float = 180.0
) -> None:
    """Return when every host is a node.

    folder: for what the nodes say.

    Needs ray beside this Python.
    """
    _start(
        lab.head, folder, "--head", f"--port={PORT}", "--include-dashboard=false", "--num-cpus=0"
    )
    for host in lab.hosts:
        _start(host, folder, f"--address={lab.head.address}:{PORT}", f"--num-cpus={cpus}", *options)
    end = time.monotonic() + timeout
    probe = [sys.executable, "-c", NODES, str(len(lab.hosts) + 1)]
    while lab.head.popen(probe, stdout=subprocess.DEVNULL).wait(timeout):
        said = "\n".join(file.read_text()[-1000:] for file in sorted(folder.glob("ray-*.log")))
        assert time.monotonic() < end, f"no Ray cluster after {timeout:g} s: {said}"


def _start(host: Host, folder: Path, *words: str) -> None:
    with (folder / f"ray-{host.name}.log").open("w") as log:
        host.popen(
            [
                *(sys.executable, "-m", "ray.scripts.scripts", "start", *words),
                *(f"--node-ip-address={host.address}", "--num-gpus=0", "--block"),
                *("--disable-usage-stats", "--object-store-memory=80000000"),
            ],
            stdout=log,
        )
