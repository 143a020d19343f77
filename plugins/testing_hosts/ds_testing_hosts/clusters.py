"""Schedulers on the hosts of a `Lab`: ``start_slurm(lab)``. They end with it."""

from __future__ import annotations

import secrets
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ds_testing.processes import clean_environment

from ds_testing_hosts.lab import Host, Lab, LabError

SLURM_PROGRAMS = ("slurmctld", "slurmd", "srun", "salloc", "sbatch", "sinfo", "munged")
READY_SECONDS = 60.0
_SLURM_CONF = """
ClusterName=lab
SlurmctldHost=head
SlurmUser={user}
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
ReturnToService=2
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmdSpoolDir=/run/slurmd
StateSaveLocation=/run/slurmctld
SlurmctldLogFile=/run/slurmctld.log
SlurmdLogFile=/run/slurmd.log
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
KillWait=5
SlurmdTimeout=15
NodeName={nodes} CPUs=8 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP
"""


@dataclass(frozen=True)
class Slurm:
    """A running cluster: its nodes are the hosts of the lab, and jobs are given to it on the
    head."""

    lab: Lab
    environment: Mapping[str, str]

    def run(
        self, command: list[str], *, status: int = 0, timeout: float = 120, cwd: str | Path = ""
    ) -> str:
        """`Host.run` on the head, where Slurm's commands find the cluster."""
        return self.lab.head.run(
            command, status=status, timeout=timeout, cwd=cwd, env=self.environment
        )


def no_slurm() -> str:
    """Why there can be no Slurm here, or ""."""
    path = "/usr/local/sbin:/usr/sbin:/sbin"
    missing = [
        name for name in SLURM_PROGRAMS if not (shutil.which(name) or shutil.which(name, path=path))
    ]
    return (
        f"Slurm needs {', '.join(missing)} (Debian: slurmctld, slurmd, slurm-client, munge)"
        if missing
        else ""
    )


def start_slurm(lab: Lab, folder: str | Path) -> Slurm:
    """Start munge everywhere, slurmctld on the head and slurmd on the hosts; returns when all nodes
    are idle.

    folder: for slurm.conf; all hosts must see it.
    """
    conf = Path(folder) / "slurm.conf"
    conf.write_text(
        _SLURM_CONF.format(user="root", nodes=",".join(host.name for host in lab.hosts))
    )
    key = secrets.token_bytes(128)
    environment = {**clean_environment(), "SLURM_CONF": str(conf)}
    environment["PATH"] += ":/usr/sbin:/sbin"
    for host in lab.everyone:
        _start_munge(host, key)
        host.run(["mkdir", "-p", "/run/slurmd", "/run/slurmctld"])
    lab.head.run(["slurmctld"], env=environment)
    for host in lab.hosts:
        host.run(["slurmd"], env=environment)
    slurm = Slurm(lab, environment)
    end = time.monotonic() + READY_SECONDS
    while (said := lab.head.run(["sinfo", "-h", "-o", "%T %D"], env=environment).split()) != [
        "idle",
        str(len(lab.hosts)),
    ]:
        if time.monotonic() > end:
            raise LabError(
                f"Slurm's nodes are not idle after {READY_SECONDS:.0f} s: {' '.join(said)}"
            )
        time.sleep(0.1)
    return slurm


def _start_munge(host: Host, key: bytes) -> None:
    folder = host.root / "run/munge"
    folder.mkdir(mode=0o755)
    (folder / "key").touch(mode=0o600)
    (folder / "key").write_bytes(key)
    own = {"key-file": "key", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    words = [f"--{option}=/run/munge/{name}" for option, name in own.items()]
    host.run(
        ["munged", *words, "--socket=/run/munge/munge.socket.2"],
        env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
    )
