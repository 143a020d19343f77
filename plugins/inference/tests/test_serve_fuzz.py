"""Requests made from numbers, against the application and a tiny random model in this process: it
outlives them all.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from ds_inference.serve.http.app import Gate, make_app  # noqa: E402
from ds_inference.serve.model import Choices, Served, open_model  # noqa: E402
from ds_inference.serve.requests import Limits  # noqa: E402
from ds_inference.serve.worker import Worker  # noqa: E402
from tiny_model import make  # noqa: E402

PATHS = ("/v1/completions", "/v1/chat/completions")
NUMBERS = [
    0, 1, -1, 2, 3, 20, 21, 63, 64, 65, 127, 128, 2**31 - 1, 2**31, 2**63 - 1, 2**63, 10**30, 10**4200,
    0.0, -0.0, 5e-324, 1e-40, 1e-7, 0.01, 0.5, 0.999999, 1.0, 1.5, 2.0, -2.0, 10.0, 1e38, 1e308,
]  # fmt: skip
COUNTED = (
    "max_tokens",
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "logprobs",
    "best_of",
    "max_completion_tokens",
    "top_logprobs",
)
RIGHT: dict[str, list[Any]] = {
    "n": [1, 2, 5], "temperature": [0, 5e-324, 1e-40, 0.7, 2.0], "top_p": [5e-324, 0.3, 1.0], "top_k": [1, 2**31 - 1],
    "min_p": [5e-324, 0.1, 1.0], "repetition_penalty": [0.01, 1.2, 10.0], "logprobs": [0, 3], "seed": [-(2**63)],
    "presence_penalty": [-2.0, 2.0], "frequency_penalty": [-2.0, 1e-40],
}  # fmt: skip
"""Also what is just within bounds, which must work in a step beside other requests."""
TEXTS = [
    "",
    "a",
    "abc",
    "é💥\u0000",
    "</s><s>",
    "\ud800",
    "\ufffd",
    "{{ 1/0 }}",
    " " * 90,
    "x" * 5_000,
]
OTHER: list[Any] = [
    None, True, False, [], {}, [[]], [0], [257], [258], [2**31], [1.5], ["a", 1], [[1], []], {"a": 1}, [None] * 17,
    [["a"] * 3] * 3, {"type": "text"}, {"include_usage": True}, [{"role": "user", "content": "a"}],
    [{"role": "assistant", "content": "a"}], [{"role": "user", "content": [{"type": "text", "text": "b"}]}],
]  # fmt: skip
FIELDS = (
    *COUNTED,
    "model",
    "prompt",
    "messages",
    "stop",
    "stream",
    "stream_options",
    "user",
    "echo",
    "suffix",
    "logit_bias",
    "tools",
    "tool_choice",
    "response_format",
    "modalities",
    "metadata",
    "x",
    "__proto__",
)
REPORTED = [
    {"top_k": 2**63}, {"top_k": 2**63 - 1}, {"repetition_penalty": 5e-324}, {"temperature": 1e-320}, {"n": 10**30},
]  # fmt: skip
"""Each of the first two ended the server for everybody."""
KNOWN = {200, 400, 404, 413, 415, 429}


def request(number: int) -> tuple[str, bytes]:
    """Path and body of request `number`: about half of them can be answered."""
    if number < len(REPORTED):
        return PATHS[0], json.dumps(
            {"model": "tiny", "prompt": "hi", "max_tokens": 2} | REPORTED[number]
        ).encode()
    chance = random.Random(number)
    path = chance.choice(PATHS)
    prompt: dict[str, Any] = {
        "prompt": chance.choice([*TEXTS[1:5], [0, 1, 2], [[3], [4, 5]], ["a", "bc"]])
    }
    chat = {"messages": [{"role": "user", "content": chance.choice(TEXTS[1:5])}]}
    body: dict[str, Any] = {"model": "tiny", "max_tokens": chance.randint(1, 6)}
    body |= prompt if path == PATHS[0] else chat
    body["stream"] = chance.random() < 0.4
    for _ in range(chance.randint(0, 2)):
        name = chance.choice(COUNTED)
        body[name] = chance.choice(RIGHT.get(name, NUMBERS) if chance.random() < 0.5 else NUMBERS)
    if chance.random() < 0.3:
        body["stop"] = chance.choice(TEXTS)
    if chance.random() < 0.3:
        body[chance.choice(FIELDS)] = chance.choice([*TEXTS, *OTHER, *NUMBERS])
    text = json.dumps(body).encode()
    if chance.random() < 0.05:
        text = text[: chance.randrange(len(text))] + chance.randbytes(3)
    return path, text


async def call(gate: Gate, path: str, body: bytes, patience: int | None) -> tuple[int, bytes]:
    """Status and answer of one request. patience: messages after which the client leaves; None: it
    stays.
    """
    said: list[dict[str, Any]] = []
    left = asyncio.Event()
    unread = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        if unread:
            return unread.pop()
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if left.is_set():
            return  # as uvicorn, where the connection is lost
        said.append(message)
        if patience is not None and len(said) >= patience:
            left.set()

    headers = [(b"content-type", b"application/json"), (b"host", b"localhost")]
    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": headers,
        "http_version": "1.1",
        "scheme": "http",
        "root_path": "",
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 1),
    }
    if patience == 0:
        left.set()
    await gate(scope, receive, send)
    return said[0]["status"] if said else 499, b"".join(m.get("body", b"") for m in said[1:])


def memory() -> int:
    """MiB that this process has in memory."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20


async def fuzz(served: Served, count: int) -> tuple[Counter[int], list[int]]:
    """Send `count` requests, some at a time; their statuses, and the memory after each tenth of
    them.
    """
    worker = Worker(served.generator, most_waiting=64)
    gate = make_app(served, worker, Limits(body=1 << 20, body_seconds=30, seconds=60, tokens=None))
    worker.start()
    statuses: Counter[int] = Counter()
    used: list[int] = []
    numbers = iter(range(count))

    async def client() -> None:
        for number in numbers:
            leaves = number % 7 == 3
            status, answer = await call(
                gate, *request(number), patience=number % 4 if leaves else None
            )
            statuses[status] += 1
            assert status in KNOWN or (leaves and status == 499), (number, status, request(number))
            assert b"server_error" not in answer or status == 429, (number, answer, request(number))
            if number % max(count // 10, 1) == 0:
                used.append(memory())

    try:
        await asyncio.gather(*(client() for _ in range(8)))
        good = await call(gate, PATHS[0], b'{"model":"tiny","prompt":"a","max_tokens":2}', None)
        assert good[0] == 200 and worker.healthy
        assert not worker.waiting and worker.active == 0 == served.generator.blocks_used
    finally:
        assert worker.stop()
    return statuses, used


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    folder = tmp_path_factory.mktemp("served") / "tiny"
    make(folder)
    return open_model(folder, None, Choices(threads=1))


@pytest.mark.slow
def test_some_hundred_requests_change_nothing(served: Served) -> None:
    statuses, _ = asyncio.run(fuzz(served, 300))
    # both what is answered and what is refused
    assert statuses[200] > 60 and statuses[400] > 60, statuses


@pytest.mark.slow
def test_ten_thousand_requests_leave_it_serving_and_its_memory_flat(served: Served) -> None:
    statuses, used = asyncio.run(fuzz(served, 10_000))
    assert statuses[200] > 2_000 and statuses[400] > 2_000, statuses
    # The first thousands fill arenas and caches of texts; the others must add nothing.
    assert min(used[6:]) - min(used[3:6]) <= 8, used
