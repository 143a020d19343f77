"""Starting the process group: who am I, how many are we, where do we meet (torch is imported only to start).

Each source of that answer (the launcher's variables, MPI, Slurm, SageMaker, AzureML) is one function over the
environment that returns a `Rendezvous` or None; the environment itself is never changed.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import logging
import os
import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ds_core.errors import CommError, ConfigError

if TYPE_CHECKING:
    from ds_core.config import RunConfig
    from ds_core.plugins import Plugins

__all__ = [
    "DEFAULT_PORT",
    "Rendezvous",
    "add_interceptors_of",
    "find_own",
    "find_rendezvous",
    "init_distributed",
    "is_initialized",
    "local_rank",
    "stop_lone",
]

log = logging.getLogger("ds_core.comm")

DEFAULT_PORT = 29500
DEFAULT_TIMEOUT_MINUTES = 30.0
MEND = "start the script with `dscore run train.py`, which sets them all"

# (source, rank, world size, local rank, local size); the first names present win.
_SCHEDULERS: tuple[tuple[str, tuple[str, ...], tuple[str, ...], tuple[str, ...], tuple[str, ...]], ...] = (
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
    # Slurm before PMI: srun sets PMI variables too, and Slurm's own also tell the first node's name.
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
_MPI = tuple(f"{name}'s variables" for name in ("Open MPI", "MVAPICH", "MPICH"))
_LOCAL_RANKS = ("LOCAL_RANK", *(name for scheduler in _SCHEDULERS for name in scheduler[3]))


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where this process stands and where all of them meet.

    address, port: of rank 0's store. source: whose variables said so, for logs and errors.
    """

    rank: int
    world_size: int
    local_rank: int
    address: str
    port: int
    source: str


def is_initialized() -> bool:
    """Whether a process group is running; loads no torch when nothing else has."""
    import sys

    if "torch.distributed" not in sys.modules:
        return False
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized()


def local_rank(env: Mapping[str, str] | None = None) -> int:
    """This process's number on its machine, from whichever launcher started it; 0 when none did."""
    env = os.environ if env is None else env
    for name in _LOCAL_RANKS:
        if env.get(name):
            return _integer(env, name)
    return 0


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = DEFAULT_PORT,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Start torch's default process group, unless one runs already. Collective: every rank calls it.

    dist_backend: None takes the accelerator's. auto_mpi_discovery: look at MPI, Slurm, SageMaker and AzureML
    variables when the launcher's are missing. distributed_port: of rank 0, where no MASTER_PORT says otherwise.
    timeout: of collectives; None means DEEPSPEED_TIMEOUT minutes, or 30. init_method: torch's, with `rank` and
    `world_size`; None finds them. dist_init_required: False means that a process group must be running already.
    config: the run's; the interceptors of its sections (`ds_interceptors`) are put into effect. A process that no
    launcher started becomes a group of one, without any address.

    Raises CommError, naming each variable that is missing or wrong, or who was expected where, within `timeout`.
    """
    plugins, run = _load_sections(config) if config is not None else (None, None)
    if is_initialized():
        log.debug("process group already runs; init_distributed leaves it as it is")
    elif dist_init_required is False:
        raise CommError(
            "dist_init_required is False, but no process group is running; call torch.distributed.init_process_group "
            "first, or leave dist_init_required out"
        )
    else:
        import torch.distributed as dist

        if not dist.is_available():
            raise CommError("this torch was built without torch.distributed; install one that has it")
        backend = dist_backend or _accelerator_backend()
        limit = timeout if timeout is not None else _default_timeout(os.environ)
        if init_method is not None and init_method != "env://":
            _start_by_method(init_method, backend, limit, rank, world_size)
        else:
            where = find_own(auto_mpi_discovery, distributed_port, rank, world_size)
            _start_found(where, backend, limit)
        if verbose and dist.get_rank() == 0:
            log.info("process group started: %d ranks over %s", dist.get_world_size(), dist.get_backend())
    if plugins is not None and run is not None:
        from ds_core.comm.fingerprint import check_ranks_agree

        check_ranks_agree({f"config.{key}": value for key, value in run.fingerprint_items().items()})
        add_interceptors_of(plugins, run)


def stop_lone() -> None:
    """Destroy a process group of one that no launcher asked for, so that the process is as before (tests)."""
    if is_initialized() and find_own() is None:
        import torch.distributed as dist

        if dist.get_world_size() == 1:
            dist.destroy_process_group()


def find_own(
    discover: bool = True, port: int = DEFAULT_PORT, rank: int = -1, world_size: int = -1
) -> Rendezvous | None:
    """`find_rendezvous` for this process. Collective the first time, in an MPI job over several hosts."""
    installed = importlib.util.find_spec("mpi4py") is not None
    return find_rendezvous(os.environ, discover, port, rank, world_size, address_by_mpi if installed else None)


@functools.cache
def address_by_mpi(rank: int, world_size: int) -> str:
    """Rank 0's address, which it broadcasts as plain bytes. Collective; importing mpi4py starts MPI.

    Raises CommError when mpi4py does not see the job.
    """
    MPI = importlib.import_module("mpi4py.MPI")
    job = MPI.COMM_WORLD
    if (job.Get_rank(), job.Get_size()) != (rank, world_size):
        raise CommError(
            f"mpi4py sees rank {job.Get_rank()} of {job.Get_size()}, but the job's variables say {rank} of "
            f"{world_size}; mpi4py was built for another MPI than the one that started the job: install it for this "
            "one, or set MASTER_ADDR to rank 0's host on all ranks"
        )
    text = bytearray(_own_address().encode().ljust(256, b"\0") if rank == 0 else 256)
    job.Bcast([text, MPI.BYTE], root=0)
    return text.rstrip(b"\0").decode()


def _own_address() -> str:
    """The address of this machine that others reach, or its name where it has no route to them."""
    for family, far in ((socket.AF_INET, "203.0.113.1"), (socket.AF_INET6, "2001:db8::1")):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:  # sends nothing; the system chooses the interface
                probe.connect((far, 9))
                return str(probe.getsockname()[0])
        except OSError:
            continue
    return socket.gethostname()


def find_rendezvous(
    env: Mapping[str, str],
    discover: bool = True,
    port: int = DEFAULT_PORT,
    rank: int = -1,
    world_size: int = -1,
    ask: Callable[[int, int], str] | None = None,
) -> Rendezvous | None:
    """What the environment says; None when nothing in it speaks of several processes.

    rank, world_size: given values take precedence (-1: not given). ask: ``(rank, world size) -> rank 0's address``,
    for MPI jobs over several hosts, whose variables do not tell it. Raises CommError for an incomplete answer.
    """
    given = {"RANK": rank, "WORLD_SIZE": world_size}
    facts = {name: str(value) for name, value in given.items() if value >= 0}
    facts = {
        **{n: env[n] for n in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if env.get(n)},
        **facts,
    }
    source = "the launcher's variables"
    if not {"RANK", "WORLD_SIZE"} <= facts.keys() and discover and (found := _from_scheduler(env)):
        source = found.pop("source")
        facts = {**found, **facts}
    if "RANK" not in facts and "WORLD_SIZE" not in facts:
        return None
    if (rank >= 0 and world_size >= 0) or (discover and _first(env, _LOCAL_RANKS)):
        facts.setdefault("LOCAL_RANK", str(local_rank(env)))
    facts.setdefault("MASTER_PORT", str(port))
    if facts.get("WORLD_SIZE") == "1":
        facts.setdefault("MASTER_ADDR", "127.0.0.1")
        facts.setdefault("LOCAL_RANK", "0")
    missing = [n for n in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR") if n not in facts]
    if missing == ["MASTER_ADDR"] and ask is not None and source in _MPI:
        facts["MASTER_ADDR"] = ask(_integer(facts, "RANK"), _integer(facts, "WORLD_SIZE"))
        missing = []
    if missing:
        known = ", ".join(f"{n}={v}" for n, v in sorted(facts.items()))
        hint = "" if discover else " (auto_mpi_discovery is off)"
        if missing == ["MASTER_ADDR"]:
            hint += (
                ", which do not tell where rank 0 is; set MASTER_ADDR to rank 0's host on all of them, or install "
                "mpi4py, by which rank 0 tells it to the others"
            )
        raise CommError(
            f"{', '.join(missing)} missing from the environment, which has {known} from {source}{hint}; {MEND}"
        )
    here = Rendezvous(
        _integer(facts, "RANK"),
        _integer(facts, "WORLD_SIZE"),
        _integer(facts, "LOCAL_RANK"),
        facts["MASTER_ADDR"],
        _integer(facts, "MASTER_PORT"),
        source,
    )
    if not 0 <= here.rank < here.world_size:
        raise CommError(
            f"RANK {here.rank} is not below WORLD_SIZE {here.world_size} (from {source}); ranks count from 0"
        )
    if not 0 <= here.port < 65536:
        raise CommError(f"MASTER_PORT {here.port} is no port; use 1024 to 65535")
    return here


def _from_scheduler(env: Mapping[str, str]) -> dict[str, str] | None:
    """RANK, WORLD_SIZE, LOCAL_RANK and, where it can be known, MASTER_ADDR, from MPI's or Slurm's variables."""
    for source, ranks, sizes, locals_, local_sizes in _SCHEDULERS:
        rank = _first(env, ranks)
        if rank is None:
            continue
        facts = {"source": f"{source}'s variables", "RANK": rank}
        size, local = _first(env, sizes), _first(env, locals_)
        if size is not None:
            facts["WORLD_SIZE"] = size
        if local is not None:
            facts["LOCAL_RANK"] = local
        one_host = size is not None and size == _first(env, local_sizes)
        facts.update(_address(env, "127.0.0.1" if one_host else None, source == "Slurm"))
        return facts
    return None


def _address(env: Mapping[str, str], fallback: str | None, slurm: bool) -> dict[str, str]:
    """Rank 0's host (and port) as the surrounding service names it; `fallback` when no service does."""
    if env.get("AZ_BATCH_MASTER_NODE"):  # AzureML on several nodes: "10.0.0.4:6000"
        host, _, port = env["AZ_BATCH_MASTER_NODE"].partition(":")
        return {"MASTER_ADDR": host, **({"MASTER_PORT": port} if port else {})}
    if env.get("AZ_BATCHAI_MPI_MASTER_NODE"):
        return {"MASTER_ADDR": env["AZ_BATCHAI_MPI_MASTER_NODE"]}
    if env.get("SM_HOSTS"):  # SageMaker: every host, as a JSON list; its launcher puts rank 0 on the first by name
        try:
            return {"MASTER_ADDR": min(json.loads(env["SM_HOSTS"]))}
        except (ValueError, TypeError) as error:
            raise CommError(f"SM_HOSTS is {env['SM_HOSTS']!r}, not a JSON list of host names") from error
    if slurm and (
        nodes := env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST")
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
        raise CommError(f"no host in the Slurm node list {nodes!r}; set MASTER_ADDR to rank 0's host")
    return host


def _first(env: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    return next((env[n] for n in names if env.get(n)), None)


def _integer(env: Mapping[str, str], name: str) -> int:
    try:
        return int(env[name])
    except ValueError:
        raise CommError(f"{name} is {env[name]!r}, which is no integer; {MEND}") from None


def _default_timeout(env: Mapping[str, str]) -> timedelta:
    text = env.get("DEEPSPEED_TIMEOUT", "")
    try:
        minutes = float(text) if text else DEFAULT_TIMEOUT_MINUTES
        if not 0 < minutes < 1e7:
            raise ValueError
    except ValueError:
        raise CommError(f"DEEPSPEED_TIMEOUT is {text!r}; it must be a positive number of minutes, as 30") from None
    return timedelta(minutes=minutes)


def _accelerator_backend() -> str:
    from ds_core.accelerator import get_accelerator

    return str(get_accelerator().communication_backend)


def add_interceptors_of(plugins: Plugins, config: RunConfig) -> None:
    """Install the interceptors of the plugins that take part. Every rank calls it, with an equal config."""
    from ds_core.comm.interceptor import add_interceptor

    for answer in plugins.ask("ds_interceptors", config=config):
        for interceptor in answer.value:
            add_interceptor(interceptor)


def _load_sections(given: Any) -> tuple[Plugins, RunConfig]:
    """The plugins whose sections a config (or what one is read from) has, and the checked config."""
    from ds_core.config import CORE_KEYS, build_config, plugin_settings, read_config
    from ds_core.config.run import RunConfig
    from ds_core.plugins import Plugins

    source = read_config(given.raw if isinstance(given, RunConfig) else given)
    plugins = Plugins(plugin_settings(source))
    owners = plugins.load_sections(key for key in source.raw if key not in CORE_KEYS)
    models = {name: (plugins.model(found), f"{found.dist} {found.version}") for name, found in owners.items()}
    config = build_config(source, models, list(plugins.sections()))
    if problems := [p for a in plugins.ask("ds_check", config=config, plugins=plugins) for p in a.value]:
        raise ConfigError(problems, source.origin)
    return plugins, config


def _start_by_method(init_method: str, backend: str, timeout: timedelta, rank: int, world_size: int) -> None:
    import torch.distributed as dist

    if rank < 0 or world_size < 1:
        raise ConfigError(
            f"init_method {init_method!r} needs rank and world_size as well; got {rank} and {world_size}",
            "init_distributed",
        )
    address = re.fullmatch(r"tcp://(\[[^\]]+\]|[^:/?]+):(\d{1,5})/?", init_method)
    if address is not None:
        place = Rendezvous(rank, world_size, 0, address[1].strip("[]"), int(address[2]), "init_method")
        _start_found(place, backend, timeout)
        return
    dist.init_process_group(backend, init_method=init_method, timeout=timeout, rank=rank, world_size=world_size)


def _start_found(where: Rendezvous | None, backend: str, timeout: timedelta) -> None:
    import torch.distributed as dist
    from torch.distributed import HashStore  # type: ignore[attr-defined]

    if where is None or where.world_size == 1:  # nobody to meet, so nothing listens
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)
        return
    from ds_core.comm.meeting import Place, meet_at_store

    place = Place(where.rank, where.world_size, where.address, where.port)
    kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        store = meet_at_store(place, timeout, kept=kept)
        dist.init_process_group(backend, store=store, rank=where.rank, world_size=where.world_size, timeout=timeout)
    except CommError as error:
        raise CommError(f"{error} (the place is from {where.source})") from error
    except (OSError, RuntimeError) as error:
        raise CommError(
            f"rank {where.rank} of {where.world_size} could not start {backend} at {where.address}:{where.port} "
            f"(from {where.source}): {error}; are all ranks started, and is the port reachable and free?"
        ) from error
