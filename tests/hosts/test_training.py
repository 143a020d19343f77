"""Runs on several hosts are runs on one host: losses by every launcher, of every split, and after a resume."""

from __future__ import annotations

from pathlib import Path

import pytest
from sites import CASES, QUICKSTART, Site, quickstart_losses, read_cases

pytestmark = pytest.mark.hosts
CLOSE = 1e-9


def test_quickstart_by_hand(site: Site, one_host: Path) -> None:
    folder = site.shared / "by_hand"
    folder.mkdir()
    site.by_hand(site.lab.hosts[:2], QUICKSTART, "--stop-after", "4", cwd=folder)
    assert quickstart_losses(folder) == quickstart_losses(one_host)


@pytest.mark.parametrize("launcher", ["ssh"])
def test_quickstart(site: Site, one_host: Path, launcher: str) -> None:
    folder = site.shared / launcher
    folder.mkdir()
    site.run("ab", "--launcher", launcher, QUICKSTART, "--stop-after", "4", cwd=folder)
    assert quickstart_losses(folder) == quickstart_losses(one_host)


def test_cases_on_two_hosts_then_one_then_three(site: Site, one_host: Path) -> None:
    """ZeRO 0 to 3, experts on all ranks, stages on different hosts; each run goes on from the one before."""
    folder = site.shared / "cases"
    folder.mkdir()
    parts = [
        site.cases(names, folder, 2 * number, 2 * number + 2, "--force-multi")
        for number, names in enumerate(("ab", "a", "abc", "bc"))
    ]
    expected = read_cases(one_host / "cases.json")
    for case, losses in expected.items():
        assert parts[0][case] == losses[:2], case  # the same number of ranks: the same bits
        assert [loss for part in parts for loss in part[case]] == pytest.approx(losses, rel=CLOSE), case


def test_fixture_of_cases_is_not_constant(one_host: Path) -> None:
    assert all(len(set(losses)) == 8 for losses in read_cases(one_host / "cases.json").values()), CASES
