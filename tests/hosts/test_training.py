"""Runs on several hosts are runs on one host: losses by every launcher, of every split, and after a
resume.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from ds_testing_hosts.clusters import no_slurm, start_slurm
from ds_testing_hosts.ray_hosts import start_ray
from sites import CASES, LIMIT, QUICKSTART, Site, quickstart_losses, read_cases

pytestmark = pytest.mark.hosts
# Sums over hosts are made host by host, so their last bits are not those of one host.
FP32 = 1e-6
FP64 = 1e-12
CLOSE = 1e-9  # with other numbers of ranks


def test_quickstart_by_hand(site: Site, one_host: Path) -> None:
    folder = site.shared / "by_hand"
    folder.mkdir()
    site.by_hand(site.lab.hosts[:2], QUICKSTART, "--stop-after", "4", cwd=folder)
    assert quickstart_losses(folder) == pytest.approx(quickstart_losses(one_host), rel=FP32)


Run = Callable[..., str]
BY_SSH = {
    "ssh": ("sshd", []),
    "pdsh": ("pdsh", []),
    "openmpi": ("mpirun.openmpi", ["--launcher-args=--allow-run-as-root"]),
    "mpich": ("mpiexec.hydra", []),
}


@pytest.fixture(scope="module", params=[*BY_SSH, "slurm", "ray"])
def launch(request: pytest.FixtureRequest, site: Site) -> Run:
    """Runs a script on two slots each of two hosts by one launcher: ``launch(script, argument, ...,
    cwd=folder)``.
    """
    name = request.param
    head = site.lab.head
    words = [sys.executable, "-m", "ds_cli", "run", "--launcher", name, "--nproc", "2"]
    if name == "slurm":
        if reason := no_slurm():
            pytest.skip(reason)
        env = start_slurm(site.lab, site.shared).environment
        return lambda *more, cwd: head.run(
            ["salloc", "-Q", "-N", "2", *words, *more], cwd=cwd, env=env, timeout=LIMIT
        )
    if name == "ray":
        pytest.importorskip("ray", reason="ray is not installed; make test-hosts does so")
        start_ray(site.lab, site.shared)
        return lambda *more, cwd: head.run([*words, "--nnodes", "2", *more], cwd=cwd, timeout=LIMIT)
    program, options = BY_SSH[name]
    if shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin") is None:
        pytest.skip(f"{program} is not installed; make test-hosts does so on Debian")
    return lambda *more, cwd: site.run("ab", "--launcher", name, *options, *more, cwd=cwd)


def same_cases(found: dict[str, list[float]], whole: dict[str, list[float]]) -> None:
    """The losses of the first steps of all cases."""
    assert found.keys() == whole.keys()
    for case, losses in found.items():
        assert losses == pytest.approx(whole[case][: len(losses)], rel=FP64), case


def test_launcher(request: pytest.FixtureRequest, site: Site, one_host: Path, launch: Run) -> None:
    """The quickstart, and every split of ranks, have the losses of as many ranks on one host."""
    folder = site.shared / request.node.callspec.id
    folder.mkdir()
    launch(QUICKSTART, "--stop-after", "4", cwd=folder)
    assert quickstart_losses(folder) == pytest.approx(quickstart_losses(one_host), rel=FP32)
    launch(CASES, str(folder / "losses.json"), str(folder), "0", "2", cwd=folder)
    same_cases(read_cases(folder / "losses.json"), read_cases(one_host / "cases.json"))


def test_cases_on_two_hosts_then_one_then_three(site: Site, one_host: Path) -> None:
    """ZeRO 0 to 3, experts on all ranks, stages on different hosts; each run goes on from the one
    before.
    """
    folder = site.shared / "cases"
    folder.mkdir()
    parts = [
        site.cases(names, folder, 2 * number, 2 * number + 2, "--force-multi")
        for number, names in enumerate(("ab", "a", "abc", "bc"))
    ]
    expected = read_cases(one_host / "cases.json")
    same_cases(parts[0], expected)
    for case, losses in expected.items():
        assert [loss for part in parts for loss in part[case]] == pytest.approx(
            losses, rel=CLOSE
        ), case


def test_each_host_has_a_folder_of_its_own(site: Site, one_host: Path) -> None:
    """Hosts change places, one that has a part is missed, and one that has none, with rank 0, gets
    all.
    """
    result = site.shared / "local.json"
    expected = read_cases(one_host / "cases.json")
    found: dict[str, list[float]] = {"zero1": [], "zero3": [], "pipeline": []}
    for number, names in enumerate(("ab", "ba", "bc", "cab")):
        first = 2 * min(number, 2)
        words = [CASES, str(result), "local:/tmp/cases", str(first), str(first + 2), *found]
        text = site.run(names, *words, status=-1 if names == "bc" else 0)
        if names == "bc":
            assert "is on no host of this run" in text, text
            continue
        for case, losses in read_cases(result).items():
            found[case] += losses
        if names == "ab":
            files = {
                host.name: {f.name for f in host.root.glob("tmp/cases/zero1/*/*")}
                for host in site.lab.hosts
            }
            assert "manifest.json" in files["a"] & files["b"] and not files["c"], files
            assert not {name for name in files["a"] & files["b"] if "rank" in name}, files
    for case, losses in found.items():
        assert losses == pytest.approx(expected[case][:6], rel=CLOSE), case


def test_fixture_of_cases_is_not_constant(one_host: Path) -> None:
    assert all(len(set(losses)) == 8 for losses in read_cases(one_host / "cases.json").values()), (
        CASES
    )
