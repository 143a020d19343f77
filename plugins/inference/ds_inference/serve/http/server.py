"""The server: its socket, its event loop, and how it ends."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import uvicorn
from ds_command_kit.show import CommandError

from ds_inference.serve.http.app import HEAD, make_app
from ds_inference.serve.http.connections import protocol
from ds_inference.serve.http.errors import Refusal
from ds_inference.serve.model import Served
from ds_inference.serve.requests import Limits
from ds_inference.serve.worker import Worker

log = logging.getLogger("ds_inference.serve")

TOKEN = "DSCORE_SERVE_TOKEN"
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_SHORTEST = 16


@dataclass(frozen=True)
class Settings:
    """How to serve."""

    host: str
    port: int
    limits: Limits
    # Answers that wait for their first token.
    max_queue: int
    max_connections: int
    # Seconds that answers get to end after SIGTERM.
    grace: float
    # The token that requests must send; None: no token is needed.
    token: str | None = None
    # Seconds for the head of a request to come, and for a client to go on reading.
    patience: float = 20.0


def token_from(file: Path | None) -> str | None:
    """The token in `file`, or in the environment; None: there is none.

    It is not shown in any message.
    """
    place = TOKEN
    text = os.environ.get(TOKEN)
    if file is not None:
        place = str(file)
        try:
            text = file.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not text"
            raise CommandError(f"--token-file {file}: {why}") from None
    if text is None:
        return None
    token = text.strip()
    # It goes into a header, and a short one can be guessed.
    if len(token) < _SHORTEST or not (token.isascii() and token.isprintable()) or " " in token:
        raise CommandError(
            f"{place}: a token is {_SHORTEST} ASCII characters or more, without spaces"
        )
    return token


def listen(host: str, port: int, token: str | None) -> socket.socket:
    """The listening socket; CommandError where others could reach a server that asks for no
    token."""
    if token is None and host not in _LOOPBACK:
        raise CommandError(
            f"--host {host}: others can reach it, so it needs a token: --token-file FILE, or "
            f"{TOKEN}"
        )
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        return socket.create_server(address[:2], family=family, backlog=256)
    except (OSError, OverflowError) as error:
        raise CommandError(f"cannot listen at {host} port {port}: {error}") from None


class Server(uvicorn.Server):
    """Ends by itself after a signal: answers get `grace` seconds, then their rest is cut off with
    an error.

    ready: called with the server's address once it listens.
    """

    def __init__(self, served: Served, settings: Settings, ready: Callable[[str], None]) -> None:
        self._settings = settings
        self._ready = ready
        self._worker = Worker(
            served.generator,
            most_waiting=settings.max_queue,
            link=served.link,
            failed=self._on_failed,
        )
        hosts = None if settings.token else _LOOPBACK
        self._gate = make_app(
            served, self._worker, settings.limits, token=settings.token, hosts=hosts
        )
        config = uvicorn.Config(
            self._gate,
            http=protocol(settings.max_connections, settings.patience),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            h11_max_incomplete_event_size=HEAD,
            timeout_graceful_shutdown=int(settings.grace + settings.patience) + 1,
        )
        super().__init__(config)
        # uvicorn handles them all; signals that a shell ignores for background jobs stay ignored.
        self._ignored = [
            n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) is signal.SIG_IGN
        ]

    def serve_until_stopped(self) -> bool:
        """Serve until a signal, or until `should_exit` is set; whether all ended well."""
        with listen(self._settings.host, self._settings.port, self._settings.token) as heard:
            # An IPv6 address in a URL is written in brackets.
            name = f"[{self._settings.host}]" if ":" in self._settings.host else self._settings.host
            self._address = f"http://{name}:{heard.getsockname()[1]}"
            self.run(sockets=[heard])
        return self._worker.stop() and self._worker.healthy

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """uvicorn's, and the generator's thread."""
        self._worker.start()
        await super().startup(sockets)
        self._ready(self._address)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """uvicorn's, which waits for answers: not for longer than `grace`."""
        self._gate.stopping = True
        log.info("stopping: %d answers have %g s to end", self._worker.active, self._settings.grace)
        cut = Refusal(503, "the server stopped before this answer was complete")
        # uvicorn's own limit would end connections without a word: before it, answers end with an
        # error of their own.
        timer = asyncio.get_running_loop().call_later(
            self._settings.grace, self._worker.fail_all, cut
        )
        await super().shutdown(sockets)
        timer.cancel()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal came; the second one ends at once."""
        if sig in self._ignored:
            return
        # `force_exit` is uvicorn's: it does not wait for running answers.
        self.force_exit = self.should_exit
        self.should_exit = True

    def _on_failed(self) -> None:
        self.should_exit = True
