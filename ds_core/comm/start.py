"""Starting the process group: who am I, how many are we, where do we meet (torch is imported only
to start).

The core reads torchrun's variables. What else an environment may say, and how ranks make sure at
the store that they belong together, is the installed `ds_rendezvous` answer's. The environment
itself is never changed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ds_core import comm
from ds_core.errors import CommError, ConfigError, PluginError

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

    from ds_core.config import RunConfig
    from ds_core.plugins import Answer, Plugins

log = logging.getLogger("ds_core.comm")

DEFAULT_PORT = 29500
_FIX = "start the script with `dscore run train.py`, which sets them all"
_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")

_choice: tuple[Answer | None] | None = None  # the `ds_rendezvous` answer of this process


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where this process stands, and the address of rank 0's store.

    source: whose variables said so, for errors.
    """

    rank: int
    world_size: int
    address: str
    port: int
    source: str


@dataclass(frozen=True, slots=True)
class Job:
    """What a `ds_rendezvous` answer finds in an environment.

    source: whose variables say so, to go after "from".
    variables: what they mean, by torchrun's names, as far as they tell.
    address: for a job that does not tell MASTER_ADDR: ``(rank, world size) -> rank 0's address``,
        collective.
    hint: another way to tell it, for the error message, where there is no `address`.
    """

    source: str
    variables: Mapping[str, str]
    address: Callable[[int, int], str] | None = None
    hint: str = ""


def is_initialized() -> bool:
    """Whether a process group is running; loads no torch when nothing else has."""
    if "torch.distributed" not in sys.modules:
        return False
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized()


def local_rank(env: Mapping[str, str] | None = None) -> int:
    """This process's number on its machine, from whichever launcher started it; 0 when none did."""
    told = os.environ if env is None else env
    if not told.get("LOCAL_RANK") and (job := _find_job(told)) is not None:
        told = job.variables
    return _integer(told, "LOCAL_RANK") if told.get("LOCAL_RANK") else 0


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
    """Start torch's default process group, unless one runs already; of one rank where no launcher
    started this process.

    dist_backend: None takes the accelerator's.
    auto_mpi_discovery: ask `ds_rendezvous` (MPI, Slurm, ...) when torchrun's variables are missing.
    distributed_port: of rank 0, where no MASTER_PORT says otherwise.
    timeout: of collectives; None means DEEPSPEED_TIMEOUT minutes, or 30.
    init_method: torch's, with `rank` and `world_size`.
    dist_init_required: False means that a process group must be running already.
    config: its interceptors (`ds_interceptors`) are installed.

    Collective. Raises CommError, which names each variable that is missing or wrong, or who was
    expected where.
    """
    plugins = run = None
    if config is not None:
        from ds_core.config import check_rules, load_config

        plugins, run = load_config(config)
        check_rules(run, plugins)
    if is_initialized():
        log.debug("process group already runs; init_distributed leaves it as it is")
    elif dist_init_required is False:
        raise CommError(
            "dist_init_required is False, but no process group is running; call "
            "torch.distributed.init_process_group first, or leave dist_init_required out"
        )
    else:
        from ds_core.accelerator import get_accelerator

        dist = _import_distributed()
        backend = dist_backend or get_accelerator().communication_backend
        limit = timeout if timeout is not None else _default_timeout(os.environ)
        if init_method in (None, "env://"):
            where = find_rendezvous(
                os.environ, auto_mpi_discovery, distributed_port, rank, world_size, True, plugins
            )
            _start(where, backend, limit)
        else:
            _start_by_method(str(init_method), backend, limit, rank, world_size)
        if verbose and dist.get_rank() == 0:
            log.info(
                "process group started: %d ranks over %s", dist.get_world_size(), dist.get_backend()
            )
    if plugins is not None and run is not None:
        add_interceptors_of(plugins, run)
        comm.check_ranks_agree({f"config.{k}": v for k, v in run.fingerprint_items().items()})


def _import_distributed() -> Any:
    """``torch.distributed``; CommError where this torch has none."""
    import torch.distributed as dist

    if not dist.is_available():
        raise CommError("this torch was built without torch.distributed; install one that has it")
    return dist


def reset() -> None:
    """Destroy a process group of one, and choose again who answers `ds_rendezvous`."""
    global _choice
    if is_initialized() and comm.world_size() == 1:
        import torch.distributed as dist

        dist.destroy_process_group()
    _choice = None


def find_rendezvous(
    env: Mapping[str, str],
    discover: bool = True,
    port: int = DEFAULT_PORT,
    rank: int = -1,
    world_size: int = -1,
    collective: bool = False,
    plugins: Plugins | None = None,
) -> Rendezvous | None:
    """What the environment says; None when nothing in it speaks of several processes.

    discover: ask `ds_rendezvous` where torchrun's variables are missing.
    rank, world_size: given values take precedence (-1: not given).
    collective: rank 0 may be asked for its address.
    plugins: the run's, to choose the `ds_rendezvous` answer from.

    Raises CommError for an incomplete answer.
    """
    if plugins is not None:
        _provider(plugins)
    # What the caller says goes before the environment, and that before what a job's scheduler says.
    facts = {name: env[name] for name in _NAMES if env.get(name)}
    if rank >= 0:
        facts["RANK"] = str(rank)
    if world_size >= 0:
        facts["WORLD_SIZE"] = str(world_size)
    source = "the launcher's variables"
    job = None
    if discover and not {"RANK", "WORLD_SIZE", "LOCAL_RANK"} <= facts.keys():
        job = _find_job(env)
    if job is not None:
        source = source if "RANK" in facts else job.source
        facts = {**job.variables, **facts}
    if "RANK" not in facts and "WORLD_SIZE" not in facts:
        return None
    # What can be filled in: a single process meets no others, and one whose place was given has no
    # launcher that counts the processes of a host.
    facts.setdefault("MASTER_PORT", str(port))
    if facts.get("WORLD_SIZE") == "1":
        facts = {"LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", **facts}
    elif min(rank, world_size) >= 0:
        facts.setdefault("LOCAL_RANK", "0")
    missing = [name for name in _NAMES if name not in facts]
    # Some schedulers tell each process its rank, but not on which host rank 0 is.
    if missing == ["MASTER_ADDR"] and collective and job is not None and job.address is not None:
        facts["MASTER_ADDR"] = job.address(_integer(facts, "RANK"), _integer(facts, "WORLD_SIZE"))
    elif missing:
        told = ", ".join(f"{name}={value}" for name, value in sorted(facts.items()))
        hint = "" if discover else " (auto_mpi_discovery is off)"
        if missing == ["MASTER_ADDR"]:
            hint += (
                ", which do not tell where rank 0 is; set MASTER_ADDR to rank 0's host on all of "
                "them"
            )
            hint += f", or {job.hint}" if job is not None and job.hint else ""
        raise CommError(
            f"{', '.join(missing)} missing from the environment, which has {told} from "
            f"{source}{hint}; {_FIX}"
        )
    return _read_place(facts, source)


def _read_place(facts: Mapping[str, str], source: str) -> Rendezvous:
    """The place that complete variables name; CommError where one of them cannot be right."""
    here = Rendezvous(
        _integer(facts, "RANK"),
        _integer(facts, "WORLD_SIZE"),
        facts["MASTER_ADDR"],
        _integer(facts, "MASTER_PORT"),
        source,
    )
    if not 0 <= here.rank < here.world_size:
        raise CommError(
            f"RANK {here.rank} is not below WORLD_SIZE {here.world_size} (from {source}); ranks "
            "count from 0"
        )
    if not 0 <= here.port < 65536:
        raise CommError(f"MASTER_PORT {here.port} is no port; use 1024 to 65535")
    return here


def add_interceptors_of(plugins: Plugins, config: RunConfig) -> None:
    """Install the interceptors of those that take part and of backends.

    Every rank calls it, with an equal config.
    """
    for answer in plugins.ask("ds_interceptors", installed=True, config=config):
        for interceptor in answer.value:
            comm.add_interceptor(interceptor)


def _provider(plugins: Plugins | None = None) -> Answer | None:
    """The `ds_rendezvous` answer of this process: chosen earlier, else now.

    plugins: choose again from these.
    """
    global _choice
    if _choice is None or plugins is not None:
        from ds_core.plugins import Plugins

        answers = [a for a in (plugins or Plugins()).offers("ds_rendezvous") if a.value is not None]
        answers.sort(key=lambda answer: -answer.value.priority)
        if len(answers) > 1 and answers[0].value.priority == answers[1].value.priority:
            raise PluginError(
                f"ds_rendezvous is answered by {answers[0].plugin} and {answers[1].plugin} with "
                "the same priority; uninstall one, or disable it with plugins.disable"
            )
        _choice = (answers[0] if answers else None,)
    return _choice[0]


def _find_job(env: Mapping[str, str]) -> Job | None:
    """The job that the installed `ds_rendezvous` answer finds; nothing of it is imported for a
    process alone.
    """
    chosen = _provider()
    if chosen is not None and chosen.value.find is not None:
        if not any(env.get(name) for name in chosen.value.variables):
            return None
        job: Job | None = chosen.resolve(chosen.value.find, "ds_rendezvous")(env)
        return job
    from ds_core.catalogue import known, missing

    if name := next(
        (n for n in sorted(known("launch_variables")) if (env.get(n) or "0") != "0"), None
    ):
        why = missing("launch_variables", name)
        raise CommError(
            f"{name} is {env[name]}, so there are several processes; {why}, or set "
            f"{', '.join(_NAMES)}"
        )
    return None


def _integer(env: Mapping[str, str], name: str) -> int:
    if not env[name].isdecimal():
        raise CommError(f"{name} is {env[name]!r}; it must be an integer >= 0; {_FIX}")
    return int(env[name])


def _default_timeout(env: Mapping[str, str]) -> timedelta:
    text = env.get("DEEPSPEED_TIMEOUT") or "30"
    with contextlib.suppress(ValueError):
        if 0 < float(text) < 1e7:
            return timedelta(minutes=float(text))
    raise CommError(
        f"DEEPSPEED_TIMEOUT is {text!r}; it must be a positive number of minutes, as 30"
    )


def _start_by_method(
    init_method: str, backend: str, timeout: timedelta, rank: int, world_size: int
) -> None:
    """Start at ``tcp://host:port``, or in any way that torch knows (``file:///path``)."""
    import torch.distributed as dist

    if rank < 0 or world_size < 1:
        raise ConfigError(
            f"init_method {init_method!r} needs rank and world_size as well; got {rank} and "
            f"{world_size}",
            "init_distributed",
        )
    url = urlsplit(init_method)
    if url.scheme == "tcp" and url.hostname and url.port:
        _start(
            Rendezvous(rank, world_size, url.hostname, url.port, "init_method"), backend, timeout
        )
    else:
        dist.init_process_group(
            backend, init_method=init_method, timeout=timeout, rank=rank, world_size=world_size
        )


def _start(where: Rendezvous | None, backend: str, timeout: timedelta) -> None:
    import torch.distributed as dist
    from torch.distributed import HashStore  # type: ignore[attr-defined]

    if where is None or where.world_size == 1:  # no other rank, so nothing listens
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)
        return
    open_store = _open_store
    chosen = _provider()
    if chosen is not None and chosen.value.store is not None:
        open_store = chosen.resolve(chosen.value.store, "ds_rendezvous")
    try:
        store = open_store(where, timeout)
        dist.init_process_group(
            backend, store=store, rank=where.rank, world_size=where.world_size, timeout=timeout
        )
    except CommError as error:
        raise CommError(f"{error} (the place is from {where.source})") from error
    except (OSError, RuntimeError) as error:
        raise CommError(
            f"rank {where.rank} of {where.world_size} could not start {backend} at "
            f"{where.address}:{where.port} (from {where.source}): {error}; are all ranks started, "
            "and is the port reachable and free?"
        ) from error


def _open_store(where: Rendezvous, timeout: timedelta) -> Store:
    """torch's store: rank 0's, or that of torchrun's agent.

    At a loopback address it listens on this machine alone.
    """
    import torch
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    hosts = where.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    listener: dict[str, Any] = {}
    if hosts and where.address in ("localhost", "127.0.0.1", "::1"):
        # a port in use: by our own store, which torch shares, or it raises
        with contextlib.suppress(OSError):
            family = socket.AF_INET6 if ":" in where.address else socket.AF_INET
            place = where.address.replace("localhost", "127.0.0.1"), where.port
            listener = {"master_listen_fd": socket.create_server(place, family=family).detach()}
            listener["use_libuv"] = torch.__version__ >= "2.8"  # before, libuv takes no socket
    store = TCPStore(
        where.address,
        where.port,
        where.world_size,
        is_master=hosts,
        timeout=timeout,
        multi_tenant=True,
        **listener,
    )
    return PrefixStore(f"ds_core/attempt{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
