"""What a launcher gives its processes besides the script: variables, cores, log files
(torch-free)."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

from ds_command_kit.show import CommandError


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
