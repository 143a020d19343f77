"""Jobs of MPI, Slurm, SageMaker and AzureML, and the errors at the store where their ranks meet."""

from __future__ import annotations

import importlib.util
import shutil
import socket
import sys
import types
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from ds_rendezvous import jobs
from ds_rendezvous.jobs import first_host
from ds_testing.kits.tools.rendezvous import start_rank
from ds_testing.processes import free_port, output, run, start

from ds_core.comm import (
    Rendezvous,
    find_rendezvous,
    init_distributed,
    is_initialized,
    local_rank,
)
from ds_core.errors import CommError

ENV = {
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "4000",
}
OMPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
SLURM = {"SLURM_PROCID": "3", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1"}


def place(env: dict[str, str]) -> tuple[int, int, int, str, int]:
    found = find_rendezvous(env)
    assert isinstance(found, Rendezvous)
    return found.rank, found.world_size, local_rank(env), found.address, found.port


@pytest.mark.parametrize(
    ("extra", "address"),
    [
        ({"MASTER_ADDR": "n0"}, "n0"),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "8"}, "127.0.0.1"),
        ({"AZ_BATCH_MASTER_NODE": "10.0.0.4"}, "10.0.0.4"),
        ({"AZ_BATCHAI_MPI_MASTER_NODE": "10.0.0.5"}, "10.0.0.5"),
        ({"SM_HOSTS": '["algo-2", "algo-1"]'}, "algo-1"),
    ],
    ids=["given", "one host", "azureml", "azureml batch ai", "sagemaker"],
)
def test_open_mpi(extra: dict[str, str], address: str) -> None:
    assert place({**OMPI, **extra}) == (3, 8, 1, address, 29500)


def test_azureml_gives_a_port_too() -> None:
    assert place({**OMPI, "AZ_BATCH_MASTER_NODE": "10.0.0.4:6000"})[3:] == ("10.0.0.4", 6000)


def test_mpich_and_intel_mpi() -> None:
    env = {"PMI_RANK": "3", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "8"}
    assert place(env) == (3, 8, 1, "127.0.0.1", 29500)


@pytest.mark.parametrize(
    ("extra", "address"),
    [
        ({"SLURM_JOB_NODELIST": "gpu[07-09,12],cpu1"}, "gpu07"),
        ({"SLURM_STEP_NODELIST": "b2,b3", "SLURM_JOB_NODELIST": "b1,b2,b3"}, "b2"),
        ({"SLURM_JOB_NODELIST": "b1", "SLURM_LAUNCH_NODE_IPADDR": "10.1.1.1"}, "b1"),
        ({"SLURM_LAUNCH_NODE_IPADDR": "10.1.1.1"}, "10.1.1.1"),
        ({"PMI_RANK": "0", "PMI_SIZE": "1", "SLURM_JOB_NODELIST": "b1"}, "b1"),
    ],
)
def test_slurm(extra: dict[str, str], address: str) -> None:
    assert place({**SLURM, **extra}) == (3, 8, 1, address, 29500)


def test_first_host_of_a_slurm_list() -> None:
    assert first_host("n[1,5]-ib,m2") == "n1-ib"
    assert first_host("solo") == "solo"
    with pytest.raises(CommError, match=r"no host in the Slurm node list '\[\]'"):
        first_host("[]")


@pytest.mark.parametrize(
    ("env", "named"),
    [
        (
            OMPI,
            [
                "MASTER_ADDR missing",
                "Open MPI's variables",
                "set MASTER_ADDR to rank 0's host",
                "install mpi4py",
            ],
        ),
        ({**SLURM, "SLURM_NTASKS": ""}, ["WORLD_SIZE, MASTER_ADDR missing", "Slurm's variables"]),
        ({**OMPI, "SM_HOSTS": "algo-1"}, ["SM_HOSTS is 'algo-1', not a JSON list"]),
    ],
)
def test_what_is_missing_or_wrong_is_named(env: dict[str, str], named: list[str]) -> None:
    with pytest.raises(CommError) as caught:
        find_rendezvous(env)
    assert all(part in str(caught.value) for part in named), str(caught.value)


def test_the_launchers_variables_come_first() -> None:
    assert place({**ENV, **OMPI, "OMPI_COMM_WORLD_RANK": "7"})[0] == 3
    assert place({**ENV, "LOCAL_RANK": "", "OMPI_COMM_WORLD_LOCAL_RANK": "2"})[:3] == (3, 8, 2)


def test_an_mpi_job_over_hosts_asks_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []

    def ask(rank: int, world_size: int) -> str:
        asked.append((rank, world_size))
        return "10.0.0.9"

    monkeypatch.setattr(jobs, "address_by_mpi", ask)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    for env in (
        OMPI,
        {"MV2_COMM_WORLD_RANK": "3", "MV2_COMM_WORLD_SIZE": "8", "MV2_COMM_WORLD_LOCAL_RANK": "1"},
    ):
        found = find_rendezvous(env, collective=True)
        assert found is not None
        assert (found.rank, found.address) == (3, "10.0.0.9")
    find_rendezvous({**OMPI, "MASTER_ADDR": "h"}, collective=True)
    find_rendezvous({**OMPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "8"}, collective=True)  # one host
    with pytest.raises(CommError):  # Slurm without a node list: there may be no MPI
        find_rendezvous(SLURM, collective=True)
    with pytest.raises(CommError):  # not on every rank
        find_rendezvous(OMPI)
    assert asked == [(3, 8)] * 2


def test_discovery_can_be_switched_off() -> None:
    assert find_rendezvous({**OMPI, "MASTER_ADDR": "h"}, discover=False) is None
    with pytest.raises(
        CommError, match="WORLD_SIZE, LOCAL_RANK missing.*auto_mpi_discovery is off"
    ):
        find_rendezvous({**OMPI, "MASTER_ADDR": "h", "RANK": "1"}, discover=False)


def test_local_rank() -> None:
    assert local_rank({}) == 0
    assert local_rank(OMPI) == 1
    assert local_rank({**OMPI, "LOCAL_RANK": "5"}) == 5


@pytest.mark.slow
def test_two_processes_under_open_mpi_variables() -> None:
    """The accelerator's own backend, the port from the argument."""
    port = free_port()
    envs = [
        {
            "OMPI_COMM_WORLD_RANK": str(r),
            "OMPI_COMM_WORLD_SIZE": "2",
            "OMPI_COMM_WORLD_LOCAL_RANK": str(r),
            "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
            "DS_ACCELERATOR": "cpu",
        }
        for r in range(2)
    ]
    both = [start_rank(env, distributed_port=port, verbose=False) for env in envs]
    assert [output(p) for p in both] == ["0 2 0 3.0", "1 2 1 3.0"]


MPI4PY = """
import os, time
from pathlib import Path
BYTE = "byte"
class COMM_WORLD:
    Get_rank = staticmethod(lambda: int(os.environ["OMPI_COMM_WORLD_RANK"]))
    Get_size = staticmethod(lambda: 2)
    def Bcast(buffer, root):
        data, kind = buffer
        told = Path(__file__).with_name("told")
        assert (kind, root, len(data)) == (BYTE, 0, 256)
        if COMM_WORLD.Get_rank() == 0:
            told.with_suffix(".new").write_bytes(bytes(data))
            told.with_suffix(".new").rename(told)
        while not told.exists():
            time.sleep(0.01)
        data[:] = told.read_bytes()
"""


def over_two_hosts(folder: Path) -> list[str]:
    (folder / "mpi4py").mkdir()
    (folder / "mpi4py" / "__init__.py").touch()
    (folder / "mpi4py" / "MPI.py").write_text(MPI4PY)
    code = f"import sys; sys.path.insert(0, {str(folder)!r})\n"
    code += SAYS.format(port=free_port())
    envs = [{**OMPI, "OMPI_COMM_WORLD_RANK": str(r), "OMPI_COMM_WORLD_SIZE": "2"} for r in range(2)]
    envs = [
        {**env, "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
        for env in envs
    ]
    return [output(p) for p in [start(code, **env) for env in envs]]


SAYS = """
import os
import torch
from ds_core import comm
from ds_rendezvous import jobs
from ds_core.errors import CommError
try:
    comm.init_distributed("gloo", distributed_port={port}, verbose=False)
    tensor = torch.tensor([comm.rank() + 1.0])
    comm.all_reduce(tensor)
    print(comm.find_rendezvous(os.environ, collective=True).address == jobs._own_address(), tensor.item())
    torch.distributed.destroy_process_group()
except CommError as error:
    print(error)
"""


def test_rank_0_broadcasts_its_address_by_mpi4py(tmp_path: Path) -> None:
    """Two processes that look to Open MPI as if each had a host of its own; the address is this
    machine's real one.
    """
    assert over_two_hosts(tmp_path) == ["True 3.0", "True 3.0"]


@pytest.mark.parametrize("rank", [0, 1])
def test_an_mpi4py_of_another_mpi_is_told(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process: the error comes before anything is sent."""
    mpi: Any = types.ModuleType("mpi4py.MPI")
    mpi.COMM_WORLD = types.SimpleNamespace(Get_rank=lambda: rank, Get_size=lambda: 1)
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", mpi)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    env = {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": "0",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    }
    with pytest.raises(CommError) as caught:
        find_rendezvous(env, collective=True)
    said = str(caught.value)
    assert f"mpi4py sees rank {rank} of 1, but the job's variables say {rank} of 2" in said
    assert "set MASTER_ADDR" in said


@pytest.mark.skipif(
    not shutil.which("mpirun") or not importlib.util.find_spec("mpi4py"),
    reason="needs mpirun and mpi4py",
)
def test_under_mpirun(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SAYS.format(port=free_port()))
    words = [
        "mpirun",
        "--allow-run-as-root",
        "--oversubscribe",
        "-np",
        "2",
        "env",
        "OMPI_COMM_WORLD_LOCAL_SIZE=1",
    ]
    assert run([*words, sys.executable, str(script)]).splitlines() == ["True 3.0"] * 2


@pytest.mark.usefixtures("clean_ds")
def test_a_tcp_address_is_met_at_in_our_way() -> None:
    """A port that is taken is told as elsewhere, instead of torch's words."""
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(CommError) as caught:
        method = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        init_distributed("gloo", init_method=method, rank=0, world_size=2)
    said = str(caught.value)
    assert "rank 0 of 2 cannot open the job's store: port" in said
    assert "(the place is from init_method)" in said
    assert not is_initialized()


@pytest.mark.usefixtures("clean_ds")
def test_nobody_there_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    env = {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(CommError) as caught:
        init_distributed("gloo", timeout=timedelta(seconds=1))
    said = str(caught.value)
    assert (
        f"rank 1 of 2 expected the store of rank 0 at 127.0.0.1:{port}, but nothing can be reached "
        "there" in said
    )
    assert "(the place is from the launcher's variables)" in said
    assert not is_initialized()
