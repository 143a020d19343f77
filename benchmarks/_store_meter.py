"""A relay in front of torch's TCPStore that counts what each rank asks of it: operations and bytes.

Rank r connects to the r-th address of the loopback network, which tells the relay whose connection
it is.
"""

from __future__ import annotations

import selectors
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

__all__ = ["Counts", "Meter", "address_of"]

# The numbers of torch's protocol, and what follows each: k key, v value, n 8-byte number, u 4-byte
# number, s: a count of keys and the keys, m: a count of pairs and the pairs.
_OPERATIONS: dict[int, tuple[str, str]] = {
    0: ("validate", "u"),
    1: ("set", "kv"),
    2: ("compare_set", "kvv"),
    3: ("get", "k"),
    4: ("add", "kn"),
    5: ("check", "s"),
    6: ("wait", "s"),
    7: ("num_keys", ""),
    8: ("delete", "k"),
    9: ("append", "kv"),
    10: ("multi_get", "s"),
    11: ("multi_set", "m"),
    12: ("cancel_wait", ""),
    13: ("ping", "u"),
}


def address_of(rank: int) -> str:
    """The loopback address at which rank `rank` reaches its store."""
    return f"127.0.{1 + rank // 250}.{1 + rank % 250}"


@dataclass(slots=True)
class Counts:
    """Of one rank. operations: by name; sent, received: bytes."""

    operations: Counter[str] = field(default_factory=Counter)
    sent: int = 0
    received: int = 0


class Meter:
    """Relays the connections of `ranks` ranks to 127.0.0.1:`store`; `port` is its own, at every
    address.
    """

    def __init__(self, store: int, ranks: int) -> None:
        self.store = store
        self.counts = [Counts() for _ in range(ranks)]
        self._selector = selectors.DefaultSelector()
        first = socket.create_server((address_of(0), 0), backlog=1024)
        self.port: int = first.getsockname()[1]
        for rank in range(ranks):
            server = (
                first
                if rank == 0
                else socket.create_server((address_of(rank), self.port), backlog=1024)
            )
            self._selector.register(
                server, selectors.EVENT_READ, self._accepter(server, self.counts[rank])
            )
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="store meter", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close every connection."""
        self._stop.set()
        self._thread.join()
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()

    def _run(self) -> None:
        while not self._stop.is_set():
            for key, _ in self._selector.select(0.1):
                key.data()

    def _accepter(self, server: socket.socket, counts: Counts) -> Callable[[], None]:
        def accept() -> None:
            rank, _ = server.accept()
            store = socket.create_connection(("127.0.0.1", self.store))
            for end in (rank, store):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            parser = _Parser(counts)
            self._selector.register(
                rank, selectors.EVENT_READ, lambda: self._move(rank, store, counts, parser)
            )
            self._selector.register(
                store, selectors.EVENT_READ, lambda: self._move(store, rank, counts, None)
            )

        return accept

    def _move(
        self, source: socket.socket, to: socket.socket, counts: Counts, parser: _Parser | None
    ) -> None:
        try:
            data = source.recv(1 << 16)
            if data:
                to.sendall(data)
        except OSError:
            data = b""
        if not data:
            for end in (source, to):
                self._selector.unregister(end)
                end.close()
        elif parser is not None:
            counts.sent += len(data)
            parser.feed(data)
        else:
            counts.received += len(data)


class _Parser:
    """Reads the operations of one connection."""

    def __init__(self, counts: Counts) -> None:
        self._counts = counts
        self._rest = b""

    def feed(self, data: bytes) -> None:
        self._rest += data
        while self._rest and (used := self._operation(self._rest)):
            self._rest = self._rest[used:]

    def _operation(self, data: bytes) -> int:
        """Count the operation that `data` begins with; its length, 0 when it is not all there."""
        name, parts = _OPERATIONS[data[0]]
        at = 1

        def skip_text() -> None:
            nonlocal at
            (size,) = struct.unpack_from("<Q", data, at)
            at += 8 + size

        try:
            for part in parts:
                if part in "kv":
                    skip_text()
                elif part in "nu":
                    at += struct.calcsize({"n": "<Q", "u": "<I"}[part])
                else:
                    (count,) = struct.unpack_from("<Q", data, at)
                    at += 8
                    for _ in range(count):
                        skip_text()
                        if part == "m":
                            skip_text()
        except struct.error:
            return 0
        if at > len(data):
            return 0
        self._counts.operations[name] += 1
        return at
