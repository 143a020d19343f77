"""dscore-launcher-ray passes the conformance kit on a real cluster; what it asks of larger ones."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
from ds_command_kit.hosts import Host
from ds_command_kit.launch import LaunchRequest
from ds_command_kit.show import CommandError
from ds_launcher_ray.choice import Wanted, bundles, devices
from ds_testing import LauncherConformance
from ds_testing_hosts.lab import Lab
from ds_testing_hosts.ray_hosts import start_ray


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with Lab("a", "b", shared=[tmp_path_factory.getbasetemp()]) as lab:
        start_ray(lab, tmp_path_factory.mktemp("ray"))
        yield lab


@pytest.mark.hosts
@pytest.mark.skipif(
    find_spec("ray") is None, reason="ray is not installed; make test-hosts brings it"
)
class TestRay(LauncherConformance):
    load = "ds_launcher_ray.launcher:launch"
    hosts = ("b", "a")
    master_addr = ""

    @pytest.fixture(autouse=True)
    def _on_nodes(self, cluster: Lab) -> None:
        self.lab = cluster

    def popen(self, command: list[str], **options: Any) -> subprocess.Popen[Any]:
        return self.lab.head.popen(command, **options)


def node(name: str, **resources: float) -> dict[str, Any]:
    number = ord(name[0]) - ord("a")
    resources = {"CPU": 8.0, **resources}
    return {
        "Alive": name != "dead",
        "NodeManagerHostname": f"{name}.site",
        "NodeManagerAddress": f"10.9.9.{number}",
        "Resources": resources,
    }


GPUS = [
    node("a", GPU=4.0),
    node("b", GPU=8.0),
    node("c", GPU=8.0),
    node("head", CPU=0.0),
    node("dead", GPU=8.0),
]


def test_what_is_asked_of_a_cluster() -> None:
    one = {"CPU": 1.0}
    # All nodes with accelerators, as many of them as each has; or as many processes as were asked
    # for.
    assert bundles(GPUS, Wanted()) == [{**one, "GPU": 4.0}] * 3
    assert bundles(GPUS, Wanted(count=2)) == [{**one, "GPU": 8.0}] * 2
    # more may come
    assert bundles(GPUS, Wanted(count=5, nproc=2, cpus=4.0)) == [{"CPU": 4.0, "GPU": 2}] * 5
    assert devices({"CPU": 4.0, "GPU": 2}) == 2 and devices(one) == 0
    # Named nodes are pinned, by name or address, in the order of the hostfile.
    named = Wanted(hosts=(("b", 0), ("10.9.9.0", 3)))
    assert bundles(GPUS, named) == [
        {**one, "node:10.9.9.1": 0.001, "GPU": 8.0},
        {**one, "node:10.9.9.0": 0.001, "GPU": 3},
    ]
    assert bundles([node("a"), node("b")], Wanted(resources={"big": 1.0}, count=1)) == [
        {**one, "big": 1.0}
    ]


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        (
            Wanted(hosts=(("z", 1),)),
            r"host 'z' is not a node of the Ray cluster; its nodes: a.site \(10.9.9.0\)",
        ),
        (Wanted(hosts=(("dead", 1),)), "host 'dead' is not a node"),
        (Wanted(count=4), "4 hosts with a GPU are asked for, and the cluster has 3"),
        (Wanted(cpus=9.0), "no node of the cluster has CPU 9"),
    ],
)
def test_what_a_cluster_does_not_have(wanted: Wanted, why: str) -> None:
    with pytest.raises(CommandError, match=why):
        bundles(GPUS, wanted)


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        (
            LaunchRequest("s.py", min_nodes=1, max_nodes=2),
            "for an elastic run use the launcher ssh",
        ),
        (LaunchRequest("s.py", hosts=(Host("a"),), ssh_port=22), "reaches no host by ssh"),
    ],
)
def test_what_is_refused(
    request_: LaunchRequest, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ds_launcher_ray import launcher

    monkeypatch.setattr(launcher.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CommandError, match="pip install ray"):
        launcher.launch(request_)
    monkeypatch.setattr(launcher.importlib.util, "find_spec", lambda name: object())
    with pytest.raises(CommandError, match=why):
        launcher.launch(request_)
