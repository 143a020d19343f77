"""The actor on one node: it runs the agent, and holds the ends of its pipes.

Standard library and ray only, and sent to the node by value: Ray's workers need nothing of ds_core
where they run from.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import threading
import time
from typing import Any

MOST = 1 << 20  # bytes of output that wait for the driver; then the ranks wait
BEAT_SECONDS = 4.0


class Node:
    """One agent.

    The driver asks `read` again and again; when it no longer does, the agent ends by itself.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.output: list[tuple[int, bytes]] = []
        self.open = 2  # pipes
        self.beat = 0.0

    def place(self) -> tuple[str, str]:
        """Name and address of this host."""
        import ray

        return socket.gethostname(), ray.util.get_node_ip_address()

    def start(self, argv: list[str], feed: bytes) -> str:
        """Run the agent and give it its settings; "" or why it cannot be run."""
        # Ray sets it to the actor's share of the cores, which says nothing of the ranks; the
        # settings bring the user's.
        environment = {
            name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"
        }
        pipe = subprocess.PIPE
        try:
            self.process = subprocess.Popen(
                argv, env=environment, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
            )
        except OSError as error:
            return f"{argv[0]}: {error.strerror}"
        for number, stream in ((1, self.process.stdout), (2, self.process.stderr)):
            threading.Thread(target=self._copy, args=(number, stream), daemon=True).start()
        self._write(feed)
        return ""

    def read(self, seconds: float) -> tuple[list[tuple[int, bytes]], int | None]:
        """What has been written since, as (1 or 2, whole lines), as soon as there is any; the exit
        code at the end.
        """
        if time.monotonic() > self.beat + BEAT_SECONDS:
            self._write(b"\n")
            self.beat = time.monotonic()
        with self.changed:
            self.changed.wait_for(lambda: self.output or not self.open, seconds)
            output, self.output = self.output, []
            self.changed.notify_all()
        if output or self.open:
            return output, None
        return [], self.process.wait()

    def end(self) -> None:
        """Ask the agent to end its ranks."""
        with contextlib.suppress(OSError):
            self.process.stdin.close()  # type: ignore[union-attr]

    def _write(self, data: bytes) -> None:
        with contextlib.suppress(OSError, ValueError):  # it has ended, or was asked to
            self.process.stdin.write(data)  # type: ignore[union-attr]
            self.process.stdin.flush()  # type: ignore[union-attr]

    def _copy(self, number: int, stream: Any) -> None:
        """Take whole lines, or what ends as a progress bar does."""
        rest = b""
        while data := os.read(stream.fileno(), 1 << 16):
            text = rest + data
            end = max(text.rfind(b"\n"), text.rfind(b"\r")) + 1 if len(text) < MOST else len(text)
            rest = text[end:]
            self._put(number, text[:end])
        self._put(number, rest)
        with self.changed:
            self.open -= 1
            self.changed.notify_all()

    def _put(self, number: int, text: bytes) -> None:
        if text:
            with self.changed:
                self.changed.wait_for(lambda: sum(len(part) for _, part in self.output) < MOST)
                self.output.append((number, text))
                self.changed.notify_all()
