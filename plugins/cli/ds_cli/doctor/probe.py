"""What ``dscore doctor --hostfile`` runs on each host: facts about it, and its half of a
measurement between two hosts.

The text of this file is sent to the host's Python, so it needs nothing there: standard library
only, Python 3.8 or later, whatever is installed. Requests come as one JSON object a line on
standard input, and answers go out likewise, each behind `MARK`, since a login may print other
things. It ends with its input.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import select
import shutil
import socket
import subprocess
import sys
import time
from importlib import metadata

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MARK = "@dscore-probe "
TORCH_SECONDS = 120.0
WAIT = 5.0  # for a peer to connect, or to send something
PINGS = 100
PING_SECONDS = 1.0
CHUNK = 1 << 18
TORCH = """
import json, torch, torch.distributed as dist
cuda = torch.cuda.is_available()
print(json.dumps({
    "torch": torch.__version__,
    "devices": torch.cuda.device_count() if cuda else 0,
    "device": torch.cuda.get_device_name(0) if cuda else "",
    "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda and dist.is_nccl_available() else "",
}))
"""


# -- facts -----------------------------------------------------------------------------------------


def facts(request: dict[str, Any]) -> dict[str, Any]:
    """What this host is and has.

    request: ``names`` of all hosts, to be looked up; ``port`` of rank 0's store; the run's
        ``folder``.
    """
    folder = request["folder"]
    return {
        "hostname": socket.gethostname(),
        "python": platform.python_version(),
        "executable": sys.executable,
        "machine": platform.machine(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "shm": _free("/dev/shm"),
        "disk": _free(folder),
        "folder": os.path.isdir(folder),
        "own": _addresses(socket.gethostname()),
        "names": {name: _addresses(name) for name in request["names"]},
        "port": _holder(request["port"]),
        "packages": _packages(),
        **_torch(),
    }


def _free(folder: str) -> int | None:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def _addresses(name: str) -> list[str]:
    try:
        return sorted(
            {str(row[4][0]) for row in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)}
        )
    except OSError:
        return []


def _packages() -> dict[str, list[str]]:
    """Distribution -> (version, digest of its sources): ds_core, and whatever has an entry point
    for it.
    """
    rows: dict[str, list[str]] = {}
    for found in metadata.distributions():
        points = [p for p in found.entry_points if p.group.startswith("ds_core.")]
        name = (found.metadata["Name"] or "").lower().replace("_", "-")
        if name == "dscore-train" or points:
            tops = {p.value.partition(":")[0].partition(".")[0] for p in points} or {"ds_core"}
            # what is found first is what is imported
            rows.setdefault(name, [found.version, _digest(sorted(tops))])
    return rows


def _digest(packages: list[str]) -> str:
    """Of the packages' Python files; equal versions of what is being worked on may differ."""
    from importlib.util import find_spec

    said = hashlib.sha256()
    for package in packages:
        with contextlib.suppress(Exception):  # what cannot be found, the versions tell of
            spec = find_spec(package)
            for root in (spec and spec.submodule_search_locations) or ():
                _add(said, root)
    return said.hexdigest()[:16]


def _add(said: Any, root: str) -> None:
    for folder, below, files in os.walk(root):
        below[:] = sorted(name for name in below if name != "__pycache__")
        for name in sorted(name for name in files if name.endswith(".py")):
            path = os.path.join(folder, name)
            with open(path, "rb") as stream:
                said.update(os.path.relpath(path, root).encode() + b"\0" + stream.read() + b"\0")


def _torch() -> dict[str, Any]:
    """What torch says of itself, in a process of its own: it may be broken, and takes seconds."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", TORCH],
            capture_output=True,
            text=True,
            timeout=TORCH_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"torch": "", "torch_error": str(error)}
    try:
        found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
        return found
    except (ValueError, IndexError):
        said = done.stderr.strip().splitlines()
        return {"torch": "", "torch_error": said[-1] if said else f"exit code {done.returncode}"}


def _holder(port: int) -> str:
    """Why nothing can listen at `port` here; "" when it is free."""
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", port))
            probe.listen(1)
        return ""
    except OSError as error:
        return f"{error.strerror or error}{_owner(port)}"


def _owner(port: int) -> str:
    """ " by pid 12 (python)", as far as this user may see it."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError), open(table) as stream:
            for row in map(str.split, stream):
                if len(row) > 9 and row[3] == "0A" and row[1].endswith(f":{port:04X}"):
                    inodes.add(f"socket:[{row[9]}]")
    for pid in filter(str.isdigit, os.listdir("/proc") if inodes else ()):
        with contextlib.suppress(OSError):
            for number in os.listdir(f"/proc/{pid}/fd"):
                if os.readlink(f"/proc/{pid}/fd/{number}") in inodes:
                    with open(f"/proc/{pid}/comm") as stream:
                        return f" by pid {pid} ({stream.read().strip()})"
    return ""


# -- one link --------------------------------------------------------------------------------------
# The host that connects makes three connections, one after the other: pings, bytes there, bytes
# back. Who receives says when it is enough, by closing, since what the sender's system has queued
# may take long.


def listen(address: str) -> socket.socket:
    """A listener at `address`, by which the peer knows this host; on every interface where it is a
    translated one.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    for place in (address, ""):
        listener = socket.socket(family)
        try:
            listener.bind((place, 0))
            listener.listen(8)
            return listener
        except OSError:
            listener.close()
            if not place:
                raise
    raise AssertionError


def serve(listener: socket.socket, token: bytes, seconds: float) -> dict[str, Any]:
    """The side that is connected to. Gives the bytes per second that came in."""
    with listener:
        with _accept(listener, token) as link:
            while link.recv(1):
                link.sendall(b"p")
        with _accept(listener, token) as link:
            rate = _receive(link, seconds)
        with _accept(listener, token) as link:
            _send(link, seconds)
    return {"rate": rate}


def connect(address: str, port: int, token: bytes, seconds: float) -> dict[str, Any]:
    """The side that connects.

    Gives the round trip in seconds, and the bytes per second that came in.
    """
    with _connect(address, port, token) as link:
        rounds: list[float] = []
        end = time.monotonic() + PING_SECONDS
        while len(rounds) < PINGS and (time.monotonic() < end or len(rounds) < 3):
            start = time.perf_counter()
            link.sendall(b"p")
            if not link.recv(1):
                raise ConnectionError("the peer closed the connection")
            rounds.append(time.perf_counter() - start)
    with _connect(address, port, token) as link:
        _send(link, seconds)
    with _connect(address, port, token) as link:
        rate = _receive(link, seconds)
    return {"round_trip": sorted(rounds)[len(rounds) // 2], "rate": rate}


def _connect(address: str, port: int, token: bytes) -> socket.socket:
    link = socket.create_connection((address, port), timeout=WAIT)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.sendall(token)
    return link


def _accept(listener: socket.socket, token: bytes) -> socket.socket:
    """The next connection of the peer. A stranger, who does not know the token, is sent away."""
    end = time.monotonic() + WAIT
    while (left := end - time.monotonic()) > 0:
        ready = select.select([listener.fileno(), 0], [], [], left)[0]
        if 0 in ready:  # the next request: the peer has failed
            raise ConnectionError("the peer gave up")
        if not ready:
            break
        link = listener.accept()[0]
        link.settimeout(WAIT)
        said = b""
        with contextlib.suppress(OSError):
            while len(said) < len(token) and (part := link.recv(len(token) - len(said))):
                said += part
        if said == token:
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return link
        link.close()
    raise TimeoutError("timed out")


def _send(link: socket.socket, seconds: float) -> None:
    """Send until the receiver has enough."""
    data = bytes(CHUNK)
    end = time.monotonic() + 4 * seconds + WAIT
    with contextlib.suppress(ConnectionError):
        while time.monotonic() < end:
            link.sendall(data)


def _receive(link: socket.socket, seconds: float) -> float:
    """Bytes per second, of the time after the first quarter: a connection starts slowly, a limiter
    lets a burst by.
    """
    buffer = memoryview(bytearray(CHUNK))
    start: float | None = None
    counted = 0
    since = 0.0
    now = 0.0
    while start is None or now < start + seconds:
        size = link.recv_into(buffer)
        if not size:
            raise ConnectionError("the peer closed the connection")
        now = time.monotonic()
        if start is None:
            start = now
        if now < start + seconds / 4:
            since = now
        else:
            since = since or now
            counted += size
    return counted / max(now - since, 1e-9)


# -- requests --------------------------------------------------------------------------------------


def answer(request: dict[str, Any], state: dict[str, Any]) -> dict[str, Any]:
    """Carry out one request.

    state: the listener that waits for its peer.
    """
    kind = request["do"]
    if kind == "facts":
        return facts(request)
    if kind == "clock":
        return {"time": time.time()}
    if kind == "listen":
        state["listener"] = listen(request["address"])
        return {"port": state["listener"].getsockname()[1]}
    token = request["token"].encode()
    if kind == "serve":
        return serve(state.pop("listener"), token, request["seconds"])
    return connect(request["address"], request["port"], token, request["seconds"])


def main() -> None:
    """Answer until there is no more input. "stop" has no answer: it ends the wait for a peer."""
    state: dict[str, Any] = {}
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what else is printed here must not mix with the answers
    while True:
        line = sys.stdin.buffer.readline()
        if not line:
            return
        request = json.loads(line.decode())
        if request["do"] == "stop":
            continue
        try:
            said = answer(request, state)
        except Exception as error:
            text = (
                (error.strerror if isinstance(error, OSError) else None)
                or str(error)
                or type(error).__name__
            )
            said = {"error": text}
        out.write(f"{MARK}{json.dumps(said)}\n")
        out.flush()


if __name__ == "__main__":
    main()
