"""Which job an environment speaks of: the variables of MPI, Slurm, SageMaker and AzureML as those
of torchrun.

The environment itself is never changed. mpi4py is imported only to ask rank 0 for its address.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import importlib.util
import json
import os
import re
import socket
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING

from ds_core.comm import Job, Rendezvous
from ds_core.errors import CommError
from ds_rendezvous.plugin import LOCAL_RANKS

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

# (source, rank, world size, local rank, local size); the first names present win.
_SCHEDULERS: tuple[
    tuple[str, tuple[str, ...], tuple[str, ...], tuple[str, ...], tuple[str, ...]], ...
] = (
    (
        "Open MPI",
        ("OMPI_COMM_WORLD_RANK",),
        ("OMPI_COMM_WORLD_SIZE",),
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    (
        "MVAPICH",
        ("MV2_COMM_WORLD_RANK",),
        ("MV2_COMM_WORLD_SIZE",),
        ("MV2_COMM_WORLD_LOCAL_RANK",),
        ("MV2_COMM_WORLD_LOCAL_SIZE",),
    ),
    # Slurm before PMI: srun sets PMI variables too, and Slurm's own also tell the first node's
    # name.
    (
        "Slurm",
        ("SLURM_PROCID",),
        ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"),
        ("SLURM_LOCALID",),
        (),
    ),
    (
        "MPICH",
        ("PMI_RANK", "PMIX_RANK"),
        ("PMI_SIZE", "PMIX_SIZE"),
        ("MPI_LOCALRANKID", "PALS_LOCAL_RANKID", "PMI_LOCAL_RANK"),
        ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
    ),
)
_NO_ADDRESS = "install mpi4py, by which rank 0 tells it to the others"


def find(env: Mapping[str, str]) -> Job | None:
    """The job that the variables of MPI or Slurm belong to; of the first scheduler that gives a
    rank.

    Where only a local rank is known (the launcher gives the rest), a job of that alone. Raises
    CommError for variables that cannot be read.
    """
    any_local = _first(env, LOCAL_RANKS)
    for source, ranks, sizes, locals_, local_sizes in _SCHEDULERS:
        rank = _first(env, ranks)
        if rank is None:
            continue
        size = _first(env, sizes)
        known = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": _first(env, locals_) or any_local}
        facts = {name: value for name, value in known.items() if value is not None}
        one_host = size is not None and size == _first(env, local_sizes)
        facts.update(_address(env, "127.0.0.1" if one_host else None, source == "Slurm"))
        by_mpi = source != "Slurm" and importlib.util.find_spec("mpi4py") is not None
        return Job(f"{source}'s variables", facts, address_by_mpi if by_mpi else None, _NO_ADDRESS)
    return Job("a local rank", {"LOCAL_RANK": any_local}) if any_local is not None else None


def open_store(where: Rendezvous, timeout: timedelta) -> Store:
    """The store of the job, when all ranks are there and fit together.

    Raises CommError within `timeout`.
    """
    from ds_rendezvous.leaving import settle
    from ds_rendezvous.meeting import Participant, meet_at_store

    atexit.unregister(settle)
    atexit.register(settle)
    place = Participant(where.rank, where.world_size, where.address, where.port)
    return meet_at_store(
        place, timeout, kept=os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    )


@functools.cache
def address_by_mpi(rank: int, world_size: int) -> str:
    """Rank 0's address, which it broadcasts as plain bytes.

    Collective; importing mpi4py starts MPI.

    Raises CommError when mpi4py does not see the job.
    """
    MPI = importlib.import_module("mpi4py.MPI")
    job = MPI.COMM_WORLD
    if (job.Get_rank(), job.Get_size()) != (rank, world_size):
        raise CommError(
            f"mpi4py sees rank {job.Get_rank()} of {job.Get_size()}, but the job's variables say "
            f"{rank} of "
            f"{world_size}; mpi4py was built for another MPI than the one that started the job: "
            "install it for this "
            "one, or set MASTER_ADDR to rank 0's host on all ranks"
        )
    text = bytearray(_own_address().encode().ljust(256, b"\0") if rank == 0 else 256)
    job.Bcast([text, MPI.BYTE], root=0)
    return text.rstrip(b"\0").decode()


def _own_address() -> str:
    """The address of this machine that others reach, or its name where it has no route to them."""
    for family, far in ((socket.AF_INET, "203.0.113.1"), (socket.AF_INET6, "2001:db8::1")):
        try:
            # sends nothing; the system chooses the interface
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((far, 9))
                return str(probe.getsockname()[0])
        except OSError:
            continue
    return socket.gethostname()


def _address(env: Mapping[str, str], fallback: str | None, slurm: bool) -> dict[str, str]:
    """Rank 0's host (and port) as the surrounding service names it; `fallback` when no service
    does.
    """
    if env.get("AZ_BATCH_MASTER_NODE"):  # AzureML on several nodes: "10.0.0.4:6000"
        host, _, port = env["AZ_BATCH_MASTER_NODE"].partition(":")
        return {"MASTER_ADDR": host, **({"MASTER_PORT": port} if port else {})}
    if env.get("AZ_BATCHAI_MPI_MASTER_NODE"):
        return {"MASTER_ADDR": env["AZ_BATCHAI_MPI_MASTER_NODE"]}
    # SageMaker: every host, as a JSON list; its launcher puts rank 0 on the first by name
    if env.get("SM_HOSTS"):
        try:
            return {"MASTER_ADDR": min(json.loads(env["SM_HOSTS"]))}
        except (ValueError, TypeError) as error:
            raise CommError(
                f"SM_HOSTS is {env['SM_HOSTS']!r}, not a JSON list of host names"
            ) from error
    if slurm and (
        nodes := env.get("SLURM_STEP_NODELIST")
        or env.get("SLURM_JOB_NODELIST")
        or env.get("SLURM_NODELIST")
    ):
        # Before SLURM_LAUNCH_NODE_IPADDR: srun may run on a login node, where no rank is.
        return {"MASTER_ADDR": first_host(nodes)}
    if slurm and env.get("SLURM_LAUNCH_NODE_IPADDR"):
        return {"MASTER_ADDR": env["SLURM_LAUNCH_NODE_IPADDR"]}
    return {"MASTER_ADDR": fallback} if fallback else {}


def first_host(nodes: str) -> str:
    """The first name of a Slurm node list: ``"gpu[07-09,12],cpu1"`` -> ``"gpu07"``."""
    match = re.match(r"([^,\[\]]*)(?:\[(\d+)[^\]]*\]([^,\[]*))?", nodes.strip())
    host = "".join(part or "" for part in match.groups()) if match else ""
    if not host:
        raise CommError(
            f"no host in the Slurm node list {nodes!r}; set MASTER_ADDR to rank 0's host"
        )
    return host


def _first(env: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    return next((env[n] for n in names if env.get(n)), None)
