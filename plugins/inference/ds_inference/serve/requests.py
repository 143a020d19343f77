"""From a request to its answer: checks, tokens, and the answer at once or as a stream of events."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ds_inference.generate.requests import SamplingParams
from ds_inference.serve.answers import Choice, Piece, Reply, Usage
from ds_inference.serve.http.errors import Refusal
from ds_inference.serve.http.metrics import Metrics
from ds_inference.serve.model import Served
from ds_inference.serve.protocol import Asked, ChatRequest, CompletionRequest, read
from ds_inference.serve.worker import Gone, Ticket, Worker

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

_QUICK = 4_000
"""Bytes of a body whose text is made into tokens on the event loop; longer ones go to a thread."""
_USUAL_TOKENS = 16
"""Tokens of a completion that does not say how many, as OpenAI's."""


@dataclass(frozen=True)
class Limits:
    """What a request may cost."""

    # Bytes of its body.
    body: int
    # Time in which the body must arrive.
    body_seconds: float
    # Time from the beginning of a request to the end of its answer.
    seconds: float
    # Tokens of an answer; None: as many as the model can.
    tokens: int | None


@dataclass(frozen=True)
class _Job:
    """A request with its prompts in tokens."""

    asked: Asked
    prompts: list[list[int]]
    # What each answer begins with, by prompt.
    echoes: list[str]
    # The parameters of each of the `n` answers to a prompt.
    params: list[SamplingParams]
    # Whether the answer comes as events.
    stream: bool

    @property
    def each(self) -> list[tuple[list[int], SamplingParams]]:
        """Prompt and parameters of each answer: all answers to the first prompt, then those to the
        second.
        """
        return [(prompt, params) for prompt in self.prompts for params in self.params]


T = TypeVar("T", ChatRequest, CompletionRequest)


class Answering(Generic[T]):
    """One route, as an ASGI application.

    kind: the requests that it reads.
    threads: where long texts are made into tokens.
    """

    def __init__(
        self,
        kind: type[T],
        served: Served,
        worker: Worker,
        limits: Limits,
        metrics: Metrics,
        threads: Executor,
    ) -> None:
        self._kind: type[T] = kind
        self._served = served
        self._worker = worker
        self._limits = limits
        self._metrics = metrics
        self._threads = threads

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        began = time.monotonic()
        body = await self._body(scope, receive)
        # Tokenizing a long text takes milliseconds, in which the event loop would answer no other
        # request.
        if len(body) <= _QUICK:
            job = self._job(body)
        else:
            job = await asyncio.get_running_loop().run_in_executor(self._threads, self._job, body)
        usage = Usage(sum(len(prompt) for prompt in job.prompts))
        # The time of the body counts as part of the request.
        left = self._limits.seconds - (time.monotonic() - began)
        with self._worker.open(job.each, max(left, 0.0)) as ticket:
            self._metrics.prompt_tokens.inc(usage.prompt)
            # The body is complete, so all that can still arrive is the client's leaving, which
            # frees the cache.
            watch = asyncio.create_task(_watch(receive, ticket))
            try:
                await self._answer(job, ticket, usage, began, send)
            finally:
                watch.cancel()
                # Answers that were cut off count too: their tokens were computed.
                self._metrics.completion_tokens.inc(usage.completion)
                scope["state"]["tokens"] = usage
        self._metrics.whole.observe(time.monotonic() - began)

    # -- the request -------------------------------------------------------------------------------

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        headers = dict(scope["headers"])
        kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
        if kind != b"application/json":  # which no web page can send here without being asked
            raise Refusal(415, "the header Content-Type must be application/json")
        # Refused before a byte is read; the header may be wrong, so received bytes are counted too.
        with contextlib.suppress(ValueError):
            self._check_size(int(headers.get(b"content-length", b"0")))
        try:
            return await asyncio.wait_for(self._all(receive), self._limits.body_seconds)
        except asyncio.TimeoutError:
            raise Refusal(
                408, f"the body was not here after {self._limits.body_seconds:g} s"
            ) from None

    def _check_size(self, size: int) -> None:
        if size > self._limits.body:
            raise Refusal(413, f"a body may have {self._limits.body} bytes at most")

    async def _all(self, receive: Receive) -> bytes:
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise Gone
            body += message.get("body", b"")
            self._check_size(len(body))
            if not message.get("more_body", False):
                return bytes(body)

    def _job(self, body: bytes) -> _Job:
        asked = read(self._kind, body)
        if asked.model != self._served.name:
            text = f"this server has no such model; it has {self._served.name!r}"
            raise Refusal(404, text, "model_not_found", "model")
        echoes = [""]
        if isinstance(asked, ChatRequest):
            field = "messages"
            prompts = [self._served.tokens.chat([message.plain() for message in asked.messages])]
        else:
            field = "prompt"
            given = asked.prompts()
            prompts = [self._tokens(one) for one in given]
            echoes = [self._echo(one) if asked.echo else "" for one in given]
        params = self._params(asked, max(len(prompt) for prompt in prompts), field)
        # After the parameters, whose errors name a field that the client has set.
        if not all(prompts):
            raise Refusal(400, "a prompt has no tokens", param=field)
        return _Job(asked, prompts, echoes, params, bool(asked.stream))

    def _tokens(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, str):
            return self._served.tokens.encode(prompt)
        if any(token >= self._served.tokens.vocabulary for token in prompt):
            text = f"tokens of this model are below {self._served.tokens.vocabulary}"
            raise Refusal(400, text, "invalid_value", "prompt")
        return prompt

    def _echo(self, prompt: str | list[int]) -> str:
        return prompt if isinstance(prompt, str) else self._served.tokens.decode(prompt)

    def _params(self, asked: Asked, longest: int, field: str) -> list[SamplingParams]:
        """How to sample each of the `n` answers to a prompt."""
        # all ranks must draw the same
        first = secrets.randbits(62) if asked.seed is None else asked.seed
        # Answers to one prompt differ, and the same request with its seed gives the same answers.
        seeds = [(first + i) % (1 << 63) for i in range(asked.n or 1)]
        return [
            SamplingParams(
                max_new_tokens=self._most(asked, longest, field),
                temperature=1.0 if asked.temperature is None else asked.temperature,
                top_p=1.0 if asked.top_p is None else asked.top_p,
                top_k=asked.top_k or 0,
                min_p=asked.min_p or 0.0,
                presence_penalty=asked.presence_penalty or 0.0,
                frequency_penalty=asked.frequency_penalty or 0.0,
                repetition_penalty=asked.repetition_penalty or 1.0,
                seed=seed,
                logprobs=_count_named(asked),
            )
            for seed in seeds
        ]

    def _most(self, asked: Asked, longest: int, field: str) -> int:
        """Tokens that an answer may have; Refusal where they can't be had."""
        # `max_tokens` is the old name of `max_completion_tokens` in chats.
        wanted = asked.max_tokens
        name = "max_tokens"
        if isinstance(asked, ChatRequest) and asked.max_completion_tokens is not None:
            wanted = asked.max_completion_tokens
            name = "max_completion_tokens"
        most = self._served.most_tokens
        room = most - longest
        if room < 1 or (wanted or 0) > room:
            text = f"the context is {most} tokens at most; this asks for {longest} of the prompt"
            text += f" and {wanted} of the answer" if wanted else " and at least one of the answer"
            raise Refusal(400, text, "context_length_exceeded", field)
        cap = self._limits.tokens
        if cap is not None and (wanted or 0) > cap:
            raise Refusal(
                400, f"`{name}` may be {cap} at most on this server", "invalid_value", name
            )
        # A chat runs to its natural end by default; a completion has OpenAI's default of 16 tokens.
        usual = room if isinstance(asked, ChatRequest) else _USUAL_TOKENS
        return min(wanted or usual, room, cap or room)

    # -- the answer --------------------------------------------------------------------------------

    async def _answer(
        self, job: _Job, ticket: Ticket, usage: Usage, began: float, send: Send
    ) -> None:
        asked = job.asked
        tokens = self._served.tokens
        chat = isinstance(asked, ChatRequest)
        reply = Reply(chat, self._served.name, asked.usage_in_stream)
        # Tokens as text are only needed for logprobs.
        name = tokens.piece if _count_named(asked) is not None else None
        choices = [Choice(i, tokens.decode, asked.stops(), name) for i in range(len(job.each))]
        echoes = [echo for echo in job.echoes for _ in job.params]
        # One source for both forms, so that they cannot differ.
        grown = self._grow(ticket, choices, usage, began)
        if not job.stream:
            texts = list(echoes)
            pieces = [list[Piece]() for _ in choices]
            async for choice, text, new in grown:
                texts[choice.index] += text
                pieces[choice.index] += new
            await _send_json(
                send, reply.whole(list(zip(choices, texts, pieces, strict=True)), usage)
            )
            return
        first = await anext(grown)  # until here an error has a status of its own
        await send({"type": "http.response.start", "status": 200, "headers": _EVENTS})
        try:
            for choice, echo in zip(choices, echoes, strict=True):
                await _event(send, reply.first(choice, echo))
            await _event(send, reply.chunk(*first))
            async for step in grown:
                await _event(send, reply.chunk(*step))
            # After all choices, with an empty list of them, as OpenAI sends it.
            if asked.usage_in_stream:
                await _event(send, reply.last(usage))
            await send(
                {"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": True}
            )
        except Refusal as error:
            # The status is sent already: an error is an event of the stream.
            await _event(send, error.body())
        except Gone:
            raise
        except Exception:
            await _event(send, Refusal(500, "this answer failed; see the server's log").body())
            raise
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _grow(
        self, ticket: Ticket, choices: list[Choice], usage: Usage, began: float
    ) -> AsyncIterator[tuple[Choice, str, list[Piece]]]:
        """What each token adds to which answer, until all have ended."""
        async for index, output in ticket:
            # The first token of all answers, which is what a client waits for.
            if usage.completion == 0:
                self._metrics.first_token.observe(time.monotonic() - began)
            usage.completion += output.token is not None
            choice = choices[index]
            text, pieces = choice.add(output)
            # A stop string ended the text. The generator does not look for those, so it is
            # stopped from here.
            if choice.finish is not None and output.finished is None:
                ticket.stop(index)
            yield choice, text, pieces


def _count_named(asked: Asked) -> int | None:
    """How many of the most probable tokens an answer names; None: it has no logprobs."""
    if isinstance(asked, ChatRequest):
        return (asked.top_logprobs or 0) if asked.logprobs else None
    return asked.logprobs if isinstance(asked, CompletionRequest) else None


async def _watch(receive: Receive, ticket: Ticket) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    ticket.fail(Gone())


_JSON = [(b"content-type", b"application/json")]
_EVENTS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


def _dump(value: Any) -> bytes:
    # "replace": half a surrogate pair, which a model may write, has no UTF-8.
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode(
        "utf-8", "replace"
    )


async def _send_json(send: Send, value: Any) -> None:
    body = _dump(value)
    headers = [*_JSON, (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def _event(send: Send, value: Any) -> None:
    if value is not None:
        await send(
            {
                "type": "http.response.body",
                "body": b"data: " + _dump(value) + b"\n\n",
                "more_body": True,
            }
        )
        # A client that left is noticed between two events: else each write to its closed connection
        # is a warning.
        await asyncio.sleep(0)
