"""A server around a generator that is no model: answers repeat the prompt's tokens backwards, over
and over.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import queue
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, cast

from ds_inference.generate.requests import Finish, Handle, Output, Request, Result
from ds_inference.serve.http.errors import Refusal
from ds_inference.serve.http.server import Server, Settings
from ds_inference.serve.model import Served, Tokens
from ds_inference.serve.requests import Limits

from ds_core.errors import UsageError

MOST = 600
LIMITS = Limits(body=1 << 20, body_seconds=5.0, seconds=30.0, tokens=500)


class Backwards:
    """As `ds_inference.generate.generator.Generator`. pace: seconds per step; `$` as the next
    token ends an answer.
    """

    def __init__(self, most_running: int = 4, pace: float = 0.0) -> None:
        self.most_running = most_running
        self.pace = pace
        self.open: list[Handle] = []
        self.cancelled = self.steps = 0
        self.broken = False

    busy = property(lambda self: bool(self.open))
    running = property(lambda self: min(len(self.open), self.most_running))
    waiting = property(lambda self: max(len(self.open) - self.most_running, 0))
    blocks_used = property(lambda self: len(self.open))
    blocks = 64

    def submit(self, request: Request) -> Handle:
        if request.prompt[0] == 0:
            raise UsageError("a prompt that can never be served")
        handle = Handle(request, [Result()])
        self.open.append(handle)
        return handle

    def cancel(self, handle: Handle) -> None:
        if handle in self.open:
            self.open.remove(handle)
            self.cancelled += 1

    def step(self) -> Sequence[Output]:
        time.sleep(self.pace)
        self.steps += 1
        if self.broken:
            raise RuntimeError(bytes(self.open[0].request.prompt).decode())
        outputs = [self._next(handle) for handle in self.open[: self.most_running]]
        self.open = [h for h in self.open if not h.done]
        return outputs

    def _next(self, handle: Handle) -> Output:
        prompt = handle.request.prompt
        params = handle.request.params
        tokens = handle.results[0].tokens
        token = prompt[-1 - len(tokens) % len(prompt)]
        tokens.append(token)
        finished = None
        if token == ord("$"):
            finished = Finish.STOP
        elif len(tokens) == params.max_new_tokens:
            finished = Finish.LENGTH
        handle.done = finished is not None
        if params.logprobs is None:
            return Output(handle, token, finished=finished)
        return Output(
            handle,
            token,
            -0.5,
            tuple((token + i, -0.5 - i) for i in range(params.logprobs)),
            finished,
        )


class Bytes:
    """As `Tokens`: every byte is a token."""

    vocabulary = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def chat(self, messages: list[dict[str, str]]) -> list[int]:
        if messages[-1]["role"] == "assistant":
            raise Refusal(400, "the model's chat template refuses these messages", param="messages")
        return self.encode("".join(f"{m['role'][0]}:{m['content']}\n" for m in messages)[:-1])

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode("utf-8", "replace")

    def piece(self, token: int) -> str:
        return self.decode([token])


def settings(**changes: Any) -> Settings:
    limits = changes.pop("limits", LIMITS)
    return Settings(
        **{
            "host": "127.0.0.1",
            "port": 0,
            "limits": limits,
            "max_queue": 40,
            "max_connections": 64,
            "grace": 5.0,
        }
        | changes
    )


@contextlib.contextmanager
def serving(generator: Backwards | None = None, **changes: Any) -> Iterator[tuple[str, Server]]:
    """The address of a server in a thread, and the server; it must end well."""
    served = Served("backwards", cast(Any, generator or Backwards()), cast(Tokens, Bytes()), MOST)
    ready: queue.SimpleQueue[str] = queue.SimpleQueue()
    server = Server(served, settings(**changes), ready.put)
    ended: list[bool] = []
    thread = threading.Thread(
        target=lambda: ended.append(server.serve_until_stopped()), daemon=True
    )
    thread.start()
    try:
        yield ready.get(timeout=30), server
    finally:
        server.should_exit = True
        thread.join(30)
    assert ended == [not getattr(generator, "broken", False)]


def raw(address: str, *parts: bytes, shut: bool = False) -> bytes:
    """What the server says to these bytes, until it closes the connection."""
    host, port = address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        with contextlib.suppress(OSError):
            for part in parts:
                connection.sendall(part)
            if shut:
                connection.shutdown(socket.SHUT_WR)
        said = b""
        with contextlib.suppress(ConnectionError):
            while piece := connection.recv(1 << 16):
                said += piece
        return said


@contextlib.contextmanager
def slow_reader(address: str, sent: bytes) -> Iterator[None]:
    """A connection on which nothing is read, with room for little."""
    host, port = address.removeprefix("http://").split(":")
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((host, int(port)))
        connection.sendall(sent)
        yield


def ask(address: str, path: str, body: Any = None) -> tuple[int, Any]:
    """Status and answer (JSON where it is that) of a GET, or of a POST of `body`."""
    connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=30)
    with contextlib.closing(connection):
        kind = {"content-type": "application/json"}
        connection.request("GET" if body is None else "POST", path, body and json.dumps(body), kind)
        response = connection.getresponse()
        text = response.read().decode()
        return response.status, json.loads(text) if "json" in response.headers[
            "content-type"
        ] else text


def post(
    body: bytes, *headers: bytes, host: bytes = b"localhost", kind: bytes = b"application/json"
) -> bytes:
    """A request for a completion as bytes, after whose answer the connection ends."""
    start = b"POST /v1/completions HTTP/1.1"
    head = [start, b"host: " + host, b"connection: close", b"content-type: " + kind]
    return b"\r\n".join([*head, b"content-length: %d" % len(body), *headers, b"", body])
