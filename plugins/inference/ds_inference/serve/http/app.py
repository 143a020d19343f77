"""The application: its routes, who may send requests, and what is logged of each."""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ds_inference.serve.http.errors import Refusal, describe
from ds_inference.serve.http.metrics import Metrics
from ds_inference.serve.model import Served
from ds_inference.serve.protocol import ChatRequest, CompletionRequest
from ds_inference.serve.requests import Answering, Limits, Message, Receive, Scope, Send
from ds_inference.serve.worker import Gone, Worker

log = logging.getLogger("ds_inference.serve")

HEAD = 16 * 1024
"""Bytes of a request's first line and headers."""


def make_app(
    served: Served,
    worker: Worker,
    limits: Limits,
    *,
    token: str | None = None,
    hosts: Sequence[str] | None = None,
) -> Gate:
    """The ASGI application.

    token: what a request must bear; None: nothing.
    hosts: names by which a request may call this server; None: any.
    """
    g = worker.generator
    # Computed when metrics are read, so that nothing has to be kept up to date.
    now: dict[tuple[str, str], Callable[[], float]] = {
        ("requests_running", "Answers that are generated."): lambda: g.running,
        ("requests_waiting", "Answers without a token yet."): lambda: len(worker.waiting),
        ("cache_blocks_used", "Blocks of the cache that hold tokens."): lambda: g.blocks_used,
        ("cache_blocks", "Blocks of the cache."): lambda: g.blocks,
    }
    metrics = Metrics(now)
    threads = ThreadPoolExecutor(1, "tokens")
    created = int(time.time())
    model = {"id": served.name, "object": "model", "created": created, "owned_by": "ds_core"}

    def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [model]})

    def one_model(request: Request) -> Response:
        if request.path_params["name"] != served.name:
            raise Refusal(
                404,
                f"this server has no such model; it has {served.name!r}",
                "model_not_found",
                "model",
            )
        return JSONResponse(model)

    async def health(request: Request) -> Response:
        status = "stopping" if gate.stopping else "ok" if worker.healthy else "failed"
        return JSONResponse({"status": status}, 200 if status == "ok" else 503)

    async def counted(request: Request) -> Response:
        text, kind = metrics.text(request.headers.get("accept", ""))
        return Response(text, headers={"content-type": kind})

    shared = (served, worker, limits, metrics, threads)
    routes = [
        Route("/v1/completions", Answering(CompletionRequest, *shared), methods=["POST"]),
        Route("/v1/chat/completions", Answering(ChatRequest, *shared), methods=["POST"]),
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", one_model),
        Route("/health", health),
        Route("/metrics", counted),
    ]
    handlers: dict[Any, Any] = {Refusal: _refuse, HTTPException: _refuse_http, Exception: _fail}
    app = Starlette(routes=routes, exception_handlers=handlers)
    gate = Gate(app, metrics, token, hosts)
    return gate


def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal)
    headers = {name.decode(): value.decode() for name, value in error.headers()}
    return JSONResponse(error.body(), error.status, headers)


def _refuse_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    texts = {404: "there is nothing at this address", 405: "this address does not take this method"}
    body = Refusal(error.status_code, texts.get(error.status_code, error.detail)).body()
    return JSONResponse(body, error.status_code, error.headers)


def _fail(request: Request, error: Exception) -> Response:
    return _refuse(request, Refusal(500, "the server failed; see its log"))


PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/models", "/health", "/metrics")


class Gate:
    """Checks who may send requests, logs and counts them.

    Neither prompts nor answers, headers nor the addresses of requests are logged.
    """

    def __init__(
        self, app: Starlette, metrics: Metrics, token: str | None, hosts: Sequence[str] | None
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._token = None if token is None else token.encode()
        self._hosts = None if hosts is None else {host.lower().encode() for host in hosts}
        # Set by the server: nothing new is answered any more.
        self.stopping = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or what else the server has to say."""
        if scope["type"] != "http":
            return
        began = time.monotonic()
        status = 499  # the client left before it was answered
        state: dict[str, Any] = {}
        scope["state"] = state

        async def seen(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            # Before the application sees the request, so that no route can forget it.
            refusal = self._refusal(scope)
            if refusal is None:
                await self._app(scope, receive, seen)
            else:
                await _refuse(Request(scope), refusal)(scope, receive, seen)
        except Gone:
            status = 499
            self._metrics.cancelled.inc()
        except Exception as error:
            log.error("while answering: %s", describe(error))
        finally:
            # Unknown paths are one label: a client must not be able to make new ones.
            path = scope["path"] if scope["path"] in PATHS else "other"
            self._metrics.requests.labels(path, status).inc()
            usage = state.get("tokens")
            client = (scope.get("client") or ("?",))[0]
            tokens = f" {usage.prompt}+{usage.completion} tokens" if usage else ""
            log.info(
                "%s %s %s %d %.3f s%s",
                client,
                scope["method"],
                path,
                status,
                time.monotonic() - began,
                tokens,
            )

    def _refusal(self, scope: Scope) -> Refusal | None:
        headers = dict(scope["headers"])
        if self._hosts is not None and _name(headers.get(b"host", b"")) not in self._hosts:
            # A web page whose name was made to mean this machine calls it by that name.
            return Refusal(
                403, "this server answers only to the names of this machine; others need a token"
            )
        if _size(scope) > HEAD:
            return Refusal(431, f"the head of a request may have {HEAD} bytes at most")
        # Needs no token, and answers while the server stops: it is what a supervisor looks at.
        if scope["path"] == "/health":
            return None
        if self.stopping:
            return Refusal(503, "the server is stopping", retry_after=5)
        if self._token is not None:
            kind, _, given = headers.get(b"authorization", b"").partition(b" ")
            # In constant time: how long a comparison takes must not tell how much of a token is
            # right.
            if kind.lower() != b"bearer" or not hmac.compare_digest(given.strip(), self._token):
                return Refusal(
                    401, "a right token is needed: Authorization: Bearer ...", "invalid_api_key"
                )
        return None


def _size(scope: Scope) -> int:
    """Bytes of a request's head, about; the connection itself ends one that is not complete at this
    size.
    """
    fields = sum(len(name) + len(value) + len(b": \r\n") for name, value in scope["headers"])
    return fields + len(scope.get("raw_path") or b"") + len(scope.get("query_string") or b"")


def _name(host: bytes) -> bytes:
    """The name in a Host header, without the port."""
    name, _, port = host.rpartition(b":")
    return (name if name and port.isdigit() else host).strip(b"[]").lower()
