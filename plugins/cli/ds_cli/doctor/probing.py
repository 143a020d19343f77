"""The other end of `probe`: start it on each host, ask it things, let pairs of hosts measure their
link (torch-free).

Hosts are asked at the same time, each in a thread of its own; one that does not answer holds nobody
else up.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import queue
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_cli.doctor import probe
from ds_core.errors import CommError

Reach = Callable[[str, Sequence[str]], "subprocess.Popen[bytes]"]
"""Start a command on a host, with pipes for its standard input, output and error."""

START = (
    "import sys;r=sys.stdin.buffer;exec(compile(r.read(int(r.readline())),'dscore-probe','exec'))"
)
CLOCK_ROUNDS = 7
# one direction of a link; all links
MEASURE_SECONDS = 0.5
ALL_SECONDS = 60.0


class Probe:
    """A probe that runs on host `name`. Raises CommError, saying why, when it does not answer."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], timeout: float) -> None:
        self.name = name
        self.process = process
        self.timeout = timeout
        self._answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._said: list[str] = []
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=read, name=f"dscore probe {name}", daemon=True)
            for read in (self._out, self._err)
        ]
        for thread in self._threads:
            thread.start()

    def _out(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            text = line.decode(errors="replace")
            if text.startswith(probe.MARK):
                self._answers.put(text[len(probe.MARK) :])
        self._answers.put(None)

    def _err(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._said.append(line.decode(errors="replace").strip())

    def send(self, data: bytes) -> None:
        """Write to the probe; whether it has gone is told by `ask`."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self.process.stdin.write(data)
            self.process.stdin.flush()

    def ask(self, request: Mapping[str, Any], timeout: float | None = None) -> dict[str, Any]:
        """Its answer to one request."""
        limit = self.timeout if timeout is None else timeout
        with self._lock:
            self.send(json.dumps(request).encode() + b"\n")
            try:
                text = self._answers.get(timeout=limit)
            except queue.Empty:
                raise CommError(f"no answer within {limit:g} s") from None
        if text is None:
            self._answers.put(None)  # for whoever asks again
            raise CommError(self._why())
        answer: dict[str, Any] = json.loads(text)
        if "error" in answer:
            raise CommError(str(answer["error"]))
        return answer

    def _why(self) -> str:
        """Why it ended, in the last words that were not ours to read."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        self._threads[1].join(1)
        said = [
            line
            for line in self._said
            if line and not line.startswith(("Warning: Permanently added", "** "))
        ]
        return said[-1] if said else f"the connection ended (exit code {self.process.poll()})"

    def close(self) -> None:
        """Let it end: with its input, or else by force."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(3)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for thread, pipe in zip(
            self._threads, (self.process.stdout, self.process.stderr), strict=True
        ):
            thread.join(1)
            if pipe is not None and not thread.is_alive():
                pipe.close()


@contextlib.contextmanager
def probes(
    names: Sequence[str], reach: Reach, timeout: float, python: str = sys.executable
) -> Iterator[list[Probe]]:
    """A probe on each host, each started at once; whether one runs shows when it is asked."""
    source = Path(probe.__file__).read_bytes()
    with contextlib.ExitStack() as stack:
        started: list[Probe] = []
        # side by side, not one after the other
        stack.callback(lambda: to_all(Probe.close, started))
        started.extend(
            Probe(name, reach(name, [python, "-u", "-c", START]), timeout) for name in names
        )
        to_all(lambda one: one.send(f"{len(source)}\n".encode() + source), started)
        yield started


def to_all(act: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
    """`act` on every item at the same time; for each what it gave, or the CommError that it
    raised."""

    def one(item: Any) -> Any:
        try:
            return act(item)
        except CommError as error:
            return error

    with ThreadPoolExecutor(max(1, len(items))) as pool:
        return list(pool.map(one, items))


def clock_offset(host: Probe) -> float:
    """Seconds by which the host's clock is ahead of this machine's, to half the quickest round
    trip.
    """
    best = (float("inf"), 0.0)
    for _ in range(CLOCK_ROUNDS):
        before = time.time()
        start = time.monotonic()
        there = host.ask({"do": "clock"})["time"]
        trip = time.monotonic() - start
        best = min(best, (trip, there - (before + trip / 2)))
    return best[1]


# -- links -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Link:
    """From one host to another."""

    source: str
    target: str
    rate: float = 0.0
    """Bytes per second."""
    round_trip: float = 0.0
    """Seconds."""
    error: str = ""
    """Why nothing was measured, or ""."""


def rounds(items: Sequence[Any]) -> Iterator[list[tuple[Any, Any]]]:
    """Every pair once, in rounds whose pairs have no member in common (a tournament)."""
    ring: list[Any] = [*items, *([None] if len(items) % 2 else [])]
    for _ in range(len(ring) - 1):
        half = len(ring) // 2
        pairs = zip(ring[:half], reversed(ring[half:]), strict=True)
        yield [(a, b) for a, b in pairs if a is not None and b is not None]
        ring[1:] = [ring[-1], *ring[1:-1]]


def measure(hosts: Sequence[Probe], addresses: Mapping[str, Mapping[str, str]]) -> list[Link]:
    """Both directions of the link between every two hosts; links without a host in common at the
    same time.

    addresses: under which address each host knows each other one.
    """
    turns = list(rounds(hosts))
    seconds = min(MEASURE_SECONDS, ALL_SECONDS / max(1, 2 * len(turns)))
    found = (
        to_all(lambda pair: _pair(pair[0], pair[1], addresses, seconds), turn) for turn in turns
    )
    return list(itertools.chain.from_iterable(itertools.chain.from_iterable(found)))


def _pair(
    a: Probe, b: Probe, addresses: Mapping[str, Mapping[str, str]], seconds: float
) -> list[Link]:
    """b connects to a.

    Where that fails each way is tried alone: a firewall may let one of them by.
    """
    error = ""
    for server, client in ((a, b), (b, a)):
        try:
            forth, back, trip = _measured(
                server, client, addresses[client.name][server.name], seconds
            )
        except CommError as fault:
            error = error or f"{client.name} cannot connect to {server.name}: {fault}"
            continue
        failed = (
            [Link(b.name, a.name, error=error)]
            if error
            else [Link(client.name, server.name, forth, trip)]
        )
        return [*failed, Link(server.name, client.name, back, trip)]
    return [Link(a.name, b.name, error=error), Link(b.name, a.name, error=error)]


def _measured(
    server: Probe, client: Probe, address: str, seconds: float
) -> tuple[float, float, float]:
    """Bytes per second from client to server and back, and the round trip."""
    if not address:
        raise CommError(f"the name {server.name!r} is not known there")
    token = secrets.token_hex(16)
    port = server.ask({"do": "listen", "address": address})["port"]
    limit = 3 * probe.WAIT + 10 * seconds
    requests = [
        (server, {"do": "serve", "token": token, "seconds": seconds}),
        (
            client,
            {"do": "connect", "address": address, "port": port, "token": token, "seconds": seconds},
        ),
    ]

    def ask(row: tuple[Probe, dict[str, Any]]) -> dict[str, Any]:
        try:
            return row[0].ask(row[1], limit)
        except CommError:
            if row[0] is client:
                server.send(b'{"do": "stop"}\n')
            raise

    there, here = to_all(ask, requests)
    for answer in (here, there):  # the client's words say more
        if isinstance(answer, CommError):
            raise answer
    return there["rate"], here["rate"], here["round_trip"]
