"""A lab on which ``dscore run`` is typed, and what came of it, for tests/hosts."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ds_testing_hosts.lab import Host, Lab, Process

__all__ = [
    "CASES",
    "ENDLESS",
    "GOING_ON",
    "LIMIT",
    "QUICKSTART",
    "Site",
    "left",
    "quickstart_losses",
    "read_cases",
]

ROOT = Path(__file__).parents[1]
CASES = str(ROOT / "tests/hosts/cases.py")
ENDLESS = str(ROOT / "tests/hosts/endless.py")
GOING_ON = str(ROOT / "tests/hosts/going_on.py")
QUICKSTART = str(ROOT / "examples/gpt/train.py")
LIMIT = 170


@dataclass(frozen=True)
class Site:
    """A lab, and a folder that all its hosts see."""

    lab: Lab
    shared: Path

    def words(self, names: str, *words: str) -> list[str]:
        """``dscore run`` with two slots on each of these hosts (each name is one letter)."""
        text = "".join(f"{name} slots=2\n" for name in names)
        (self.lab.head.root / "tmp/hostfile").write_text(text)
        return [sys.executable, "-m", "ds_cli", "run", "--hostfile", "/tmp/hostfile", *words]

    def run(
        self,
        names: str,
        *words: str,
        status: int = 0,
        cwd: Path | None = None,
        timeout: float = LIMIT,
    ) -> str:
        """Run it on head."""
        return self.lab.head.run(
            self.words(names, *words), status=status, cwd=cwd or self.shared, timeout=timeout
        )

    def start(self, names: str, *words: str) -> subprocess.Popen[str]:
        """Start it on head."""
        return self.lab.head.popen(self.words(names, *words), cwd=self.shared)

    def by_hand(self, hosts: Sequence[Host], *words: str, cwd: Path | None = None) -> None:
        """Start it on each host, as a cluster's own tools would; all must end well."""
        place = [
            "--no-ssh",
            "--nnodes",
            str(len(hosts)),
            "--master-addr",
            hosts[0].name,
            "--master-port",
            "29400",
        ]
        run = [sys.executable, "-m", "ds_cli", "run", *place, "--nproc", "2"]
        started = [
            host.popen([*run, "--node-rank", str(rank), *words], cwd=cwd or self.shared)
            for rank, host in enumerate(hosts)
        ]
        texts = [process.communicate(timeout=LIMIT)[0] for process in started]
        assert all(process.returncode == 0 for process in started), "\n".join(texts)

    def cases(
        self, names: str, folder: Path, first: int, last: int, *words: str
    ) -> dict[str, list[float]]:
        """Each case's losses of these steps."""
        self.run(
            names, *words, CASES, str(folder / "losses.json"), str(folder), str(first), str(last)
        )
        return read_cases(folder / "losses.json")


def left(host: Host) -> list[Process]:
    """What runs on it besides OpenSSH's server, whose own part of a cut connection waits for its
    end.
    """
    return (
        [p for p in host.processes() if p.words and not p.words[0].startswith("sshd")]
        if host.on
        else []
    )


def read_cases(file: Path) -> dict[str, list[float]]:
    """What ``cases.py`` wrote."""
    found: dict[str, list[float]] = json.loads(file.read_text())
    return found


def quickstart_losses(folder: Path) -> list[float]:
    """What the quickstart's CSV monitor wrote under its working folder."""
    with open(folder / "runs/gpt/Train_Samples_train_loss.csv", newline="") as file:
        return [float(row[1]) for row in list(csv.reader(file))[1:]]
