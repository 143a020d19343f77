"""What a launcher gives its processes besides the script: variables, cores, log files
(torch-free)."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ds_cli.show import CommandError


def import_torch() -> None:
    """With its warnings in C++ off, for this process alone: a store that has gone is told of by
    us."""
    with environment({"TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR")}):
        import torch  # noqa: F401


@contextlib.contextmanager
def environment(changes: Mapping[str, str | None]) -> Iterator[None]:
    """`os.environ` with `changes` (None removes), put back afterwards; torch's launcher copies it
    for each process.
    """
    before = {name: os.environ.get(name) for name in changes}
    try:
        _set(changes)
        yield
    finally:
        _set(before)


def _set(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def activated(script: str) -> dict[str, str | None]:
    """The changes to the environment that sourcing `script` in bash makes.

    Raises CommandError when that fails.
    """
    if not os.path.isfile(script):
        raise CommandError(f"--venv-script: no such file: {script!r}")
    bash = shutil.which("bash")
    if bash is None:
        raise CommandError("--venv-script needs bash, which is not installed")
    ended = subprocess.run(
        [bash, "--noprofile", "--norc", "-c", 'source "$1" >&2 && exec env -0', "dscore", script],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    if ended.returncode:
        said = ended.stderr.decode(errors="replace").strip().splitlines()
        raise CommandError(
            f"--venv-script {script!r} failed with exit code {ended.returncode}: "
            f"{(said or [''])[-1]}"
        )
    rows = (row.partition("=") for row in os.fsdecode(ended.stdout).split("\0") if row)
    after = {name: value for name, _, value in rows}
    changes: dict[str, str | None] = {n: v for n, v in after.items() if os.environ.get(n) != v}
    changes |= {name: None for name in os.environ if name not in after}
    for own in ("_", "SHLVL", "PWD", "OLDPWD"):
        changes.pop(own, None)
    return changes


# -- cores -----------------------------------------------------------------------------------------


def _allowed() -> set[int]:
    affinity = getattr(os, "sched_getaffinity", None)
    return set(affinity(0)) if affinity is not None else set(range(os.cpu_count() or 1))


def threads_per_rank(nproc: int, cores: Sequence[Sequence[int]] = ()) -> int:
    """How many threads a process should compute with: its share of the cores; where bound, without
    hyper-threads.
    """
    return (
        min(len({_core(cpu) for cpu in own}) for own in cores)
        if cores
        else max(1, len(_allowed()) // nproc)
    )


def parse_cores(text: str) -> list[int]:
    """``"0,2-4"`` -> [0, 2, 3, 4]. Raises CommandError for anything else."""
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,5})(?:-([0-9]{1,5}))?\s*", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last:
            raise CommandError(
                f"--bind-core-list {text!r} must be numbers and ranges, as in 0-7,16-23"
            )
        found += range(first, last + 1)
    if len(set(found)) != len(found):
        raise CommandError(f"--bind-core-list {text!r} names a core twice")
    return found


def cores_of_ranks(nproc: int, listed: Sequence[int] = ()) -> list[list[int]]:
    """An equal share of `listed` (empty: of all cores that we may use) for each process; neighbours
    stay together.

    Raises CommandError for cores that we may not use, or when there are fewer than processes.
    """
    if not hasattr(os, "sched_setaffinity"):
        raise CommandError(f"--bind-cores-to-rank: {sys.platform} cannot bind processes to cores")
    allowed = _allowed()
    if strangers := sorted(set(listed) - allowed):
        raise CommandError(
            f"--bind-core-list: core {', '.join(map(str, strangers[:8]))} cannot be used here; "
            "this process may use "
            f"{', '.join(map(str, sorted(allowed)[:16]))}{' ...' if len(allowed) > 16 else ''}"
        )
    cores = list(listed) or sorted(allowed, key=lambda cpu: (_core(cpu), cpu))
    share = len(cores) // nproc
    if share < 1:
        raise CommandError(
            f"--bind-cores-to-rank: {len(cores)} cores cannot be divided among {nproc} processes"
        )
    return [cores[i * share : (i + 1) * share] for i in range(nproc)]


def _core(cpu: int) -> tuple[int, int]:
    """(package, first sibling) of a logical CPU, which hyper-threads of one core share; itself
    where unknown.
    """
    place = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
    try:
        package = int((place / "physical_package_id").read_text())
        first = re.match(r"\d+", (place / "thread_siblings_list").read_text())
        return package, int(first[0]) if first else cpu
    except (OSError, ValueError):
        return 0, cpu


# -- the network -----------------------------------------------------------------------------------


def interface_of(address: str) -> str:
    """The name of the interface that has this IPv4 address; "" when none has, or the system cannot
    tell.
    """
    if not sys.platform.startswith("linux"):
        return ""
    import fcntl

    get_address = 0x8915  # SIOCGIFADDR
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has none
                row = fcntl.ioctl(probe.fileno(), get_address, name.encode()[:15].ljust(256, b"\0"))
                if socket.inet_ntoa(row[20:24]) == address:
                    return name
    return ""


# -- files -----------------------------------------------------------------------------------------


def log_prefix(folder: str) -> str:
    """What the log files of this run begin with, ``FOLDER/<time>``; the folder is made.

    Raises CommandError.
    """
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise CommandError(f"--enable-each-rank-log {folder!r}: {error.strerror}") from error
    return os.path.join(os.path.abspath(folder), time.strftime("%Y%m%d%H%M%S"))


@contextlib.contextmanager
def pid_file(wanted: bool) -> Iterator[list[str]]:
    """Write this process's id to ``<temporary folder>/<id>.dscore`` while entered; gives the files
    that were made.
    """
    if not wanted:
        yield []
        return
    path = os.path.join(tempfile.gettempdir(), f"{os.getpid()}.dscore")
    try:
        # Others may write to this folder too: never through what they have put there.
        with open(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644), "w") as file:
            file.write(f"{os.getpid()}\n")
    except FileExistsError:
        raise CommandError(
            f"--save-pid: {path} is there already, left by a killed run or somebody else"
        ) from None
    try:
        yield [path]
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)
