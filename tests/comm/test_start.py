"""Starting with torchrun's variables and torch's store alone, and what a `ds_rendezvous` answer
adds.
"""

from __future__ import annotations

import os
import socket
import sys
import types
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from ds_testing.kits.tools.rendezvous import start_rank
from ds_testing.processes import free_port, output
from ds_testing.processes import start as start_python

from ds_core.comm import is_initialized, start
from ds_core.comm.start import Job, Rendezvous, _default_timeout, find_rendezvous, local_rank
from ds_core.entries import RendezvousEntry
from ds_core.errors import CommError, ConfigError, PluginError
from ds_core.plugins import Plugins
from ds_core.plugins.discovery import BACKENDS, Found

ENV = {
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "4000",
}
ALL_BY_HAND = {"DS_PLUGINS_DISABLE_AUTOLOAD": "1"}  # nobody answers ds_rendezvous


def place(env: dict[str, str]) -> tuple[int, int, str, int]:
    found = find_rendezvous(env)
    assert isinstance(found, Rendezvous)
    return found.rank, found.world_size, found.address, found.port


def find_own(**arguments: Any) -> Rendezvous | None:
    return find_rendezvous(os.environ, collective=True, **arguments)


def test_nothing_in_the_environment_is_one_process() -> None:
    assert find_rendezvous({}) is None
    assert find_rendezvous({"MASTER_ADDR": "x", "LOCAL_RANK": "0"}) is None


def test_the_launchers_variables() -> None:
    assert place(ENV) == (3, 8, "10.0.0.1", 4000)
    assert place({**ENV, "MASTER_PORT": ""})[-1] == 29500
    assert local_rank(ENV) == 1
    assert local_rank({}) == 0


@pytest.mark.parametrize(
    ("env", "named"),
    [
        ({"RANK": "1"}, ["WORLD_SIZE, LOCAL_RANK, MASTER_ADDR missing", "RANK=1", "dscore run"]),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "h"}, ["LOCAL_RANK missing"]),
        ({**ENV, "MASTER_ADDR": ""}, ["MASTER_ADDR missing", "set MASTER_ADDR to rank 0's host"]),
        ({**ENV, "RANK": "8"}, ["RANK 8 is not below WORLD_SIZE 8"]),
        ({**ENV, "RANK": "one"}, ["RANK is 'one'"]),
        ({**ENV, "MASTER_PORT": "70000"}, ["MASTER_PORT 70000"]),
    ],
)
def test_what_is_missing_or_wrong_is_named(env: dict[str, str], named: list[str]) -> None:
    with pytest.raises(CommError) as caught:
        find_rendezvous(env)
    assert all(part in str(caught.value) for part in named), str(caught.value)


def test_arguments_take_precedence() -> None:
    found = find_rendezvous({**ENV, "LOCAL_RANK": ""}, rank=0, world_size=2)
    assert found is not None
    assert (found.rank, found.world_size) == (0, 2)


def test_timeout_from_the_environment() -> None:
    assert _default_timeout({}).total_seconds() == 1800
    assert _default_timeout({"DEEPSPEED_TIMEOUT": "1.5"}).total_seconds() == 90
    for bad in ("soon", "0", "-1", "nan", "inf"):
        with pytest.raises(CommError, match=f"DEEPSPEED_TIMEOUT is '{bad}'"):
            _default_timeout({"DEEPSPEED_TIMEOUT": bad})


ALONE = """
import os, sys, types
from ds_core import comm
from ds_core.errors import DSError

class Nothing(comm.Interceptor):
    def around(self, collective, call):
        return call()

def ds_interceptors(config):
    assert comm.is_initialized() and config.core.gradient_clipping == 3
    return [Nothing()]

sys.modules["probe"] = types.ModuleType("probe")
sys.modules["probe"].ds_interceptors = ds_interceptors
assert "torch" not in sys.modules
before = dict(os.environ)
try:
    comm.init_distributed("gloo", dist_init_required=False)
except DSError as error:
    assert "dist_init_required is False, but no process group is running" in str(error)
assert not comm.is_initialized()
comm.init_distributed("gloo", config={"plugins": ["probe"], "gradient_clipping": 3})
comm.init_distributed("gloo", dist_init_required=True)
assert comm.is_initialized() and len(comm.interceptors()) == 1
assert dict(os.environ) == before
import torch, torch.distributed as dist
tensor = torch.ones(2)
dist.all_reduce(tensor)
print(dist.get_rank(), dist.get_world_size(), dist.get_backend(), tensor.tolist())
dist.destroy_process_group()
"""


def test_a_plain_script_is_a_group_of_one() -> None:
    assert output(start_python(ALONE)) == "0 1 gloo [1.0, 1.0]"


TWICE = """
import os
from datetime import timedelta
import torch
from ds_core import comm
for port in os.environ["PORTS"].split():
    os.environ["MASTER_PORT"] = port  # at the old one a rank may find the store that rank 0 is about to close
    comm.init_distributed("gloo", verbose=False, timeout=timedelta(seconds=60))
    tensor = torch.tensor([comm.rank() + 1.0])
    comm.all_reduce(tensor)
    comm.barrier()
    torch.distributed.destroy_process_group()
print(comm.local_rank(), tensor.item())
"""


@pytest.mark.slow
def test_two_processes_with_torchs_store_alone() -> None:
    """Nobody answers ds_rendezvous; a second process group works too."""
    port = {"MASTER_ADDR": "localhost", "PORTS": f"{free_port()} {free_port()}", "WORLD_SIZE": "2"}
    envs = [{**ALL_BY_HAND, **port, "RANK": str(r), "LOCAL_RANK": str(r)} for r in range(2)]
    assert [output(p) for p in [start_python(TWICE, **env) for env in envs]] == ["0 3.0", "1 3.0"]


@pytest.mark.slow
def test_torchs_store_alone_says_where_it_looked() -> None:
    """A port that is taken, and nobody at the port."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        method = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        said = output(
            start_rank(ALL_BY_HAND, dist_backend="gloo", init_method=method, rank=0, world_size=2)
        )
    assert f"rank 0 of 2 could not start gloo at {method[6:]} (from init_method): " in said
    env = {**ENV, **ALL_BY_HAND, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    said = output(start_rank(env, dist_backend="gloo", timeout=timedelta(seconds=1)))
    assert "rank 3 of 8 could not start gloo at 127.0.0.1:" in said
    assert "are all ranks started" in said


def test_the_store_at_a_loopback_address_is_for_this_machine_alone() -> None:
    port = free_port()
    where = Rendezvous(0, 1, "localhost", port, "a test")
    store = start._open_store(where, timedelta(seconds=30))
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.3", port), 5)
    store.set("key", "value")
    assert store.get("key") == b"value"


def test_a_variable_that_only_a_package_reads_names_the_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nobody = Plugins(found=[])
    monkeypatch.setattr(start, "_choice", None)
    for alone in ({}, {"SLURM_PROCID": "0"}):
        for name in ("SLURM_PROCID", *ENV):
            monkeypatch.delenv(name, raising=False)
        for name, value in alone.items():
            monkeypatch.setenv(name, value)
        assert find_own(plugins=nobody) is None
    monkeypatch.setenv("SLURM_PROCID", "1")
    with pytest.raises(
        CommError,
        match="SLURM_PROCID is 1, so there are several processes; .* by dscore-rendezvous",
    ):
        find_own(plugins=nobody)


# -- an answer to ds_rendezvous --------------------------------------------------------------------

DESK = {"DESK": "3 of 8"}


def find_desk(env: Mapping[str, str]) -> Job:
    rank, _, size = env["DESK"].partition(" of ")
    return Job(
        "the desk",
        {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": "0"},
        lambda rank, size: f"desk{rank}{size}",
    )


def answering(monkeypatch: pytest.MonkeyPatch, **entries: RendezvousEntry | None) -> Plugins:
    """Plugins of which each answers with one of `entries`."""
    found = []
    for name, entry in entries.items():
        module: Any = types.ModuleType(name)
        module.ds_rendezvous = lambda entry=entry: entry
        module.find = find_desk
        monkeypatch.setitem(sys.modules, name, module)
        found.append(Found(name, BACKENDS, name, f"ds-{name}", "1"))
    monkeypatch.setattr(start, "_choice", None)
    return Plugins(found=found)


def test_the_answer_of_the_highest_priority_finds_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ENV:
        monkeypatch.delenv(name, raising=False)
    low = RendezvousEntry("nowhere:find", None, ("DESK",))
    high = RendezvousEntry("desk:find", None, ("DESK",), 1)
    plugins = answering(monkeypatch, desk=high, other=low, silent=None)
    assert find_own(plugins=plugins) is None  # nothing is imported: none of the variables is set
    monkeypatch.setenv("DESK", "3 of 8")
    assert find_own(plugins=plugins) == Rendezvous(3, 8, "desk38", 29500, "the desk")
    assert find_own(discover=False) is None
    # asking rank 0 is collective
    with pytest.raises(CommError, match="MASTER_ADDR missing .* from the desk"):
        find_rendezvous(os.environ)
    assert find_rendezvous({**DESK, **ENV}) == Rendezvous(
        3, 8, "10.0.0.1", 4000, "the launcher's variables"
    )


def test_what_is_wrong_with_answers_names_the_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    same = RendezvousEntry("nowhere:find", None, ("DESK",))
    with pytest.raises(
        PluginError, match=r"'desk' \(ds-desk 1.* and 'other' \(ds-other 1.*same priority"
    ):
        find_own(plugins=answering(monkeypatch, desk=same, other=same))
    monkeypatch.setenv("DESK", "3 of 8")
    with pytest.raises(
        PluginError,
        match=r"'desk' \(ds-desk 1.* cannot serve ds_rendezvous: cannot load 'nowhere:find'",
    ):
        find_own(rank=0, plugins=answering(monkeypatch, desk=same))


@pytest.mark.slow
def test_two_processes_by_a_file(tmp_path: Path) -> None:
    method = f"file://{tmp_path / 'store'}"
    both = [
        start_rank({}, dist_backend="gloo", init_method=method, rank=r, world_size=2)
        for r in range(2)
    ]
    assert [output(p) for p in both] == ["0 2 0 3.0", "1 2 0 3.0"]


def test_bad_arguments_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is started, so in this process."""
    for name in ENV:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match="'tcp://127.0.0.1:1' needs rank and world_size"):
        start.init_distributed("gloo", init_method="tcp://127.0.0.1:1")
    with pytest.raises(ConfigError, match="steps_per_print"):
        start.init_distributed("gloo", config={"steps_per_print": "maybe"})
    assert not is_initialized()
