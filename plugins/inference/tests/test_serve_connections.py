"""Connections of `dscore serve`: long heads, clients that half-close, and clients that reset."""

from __future__ import annotations

import json
import logging
import socket
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from serving import Backwards, ask, post, raw, serving  # noqa: E402

ASKED = {"model": "backwards", "prompt": "abc", "max_tokens": 5}


def until(right: Callable[[], bool], seconds: float = 10.0) -> None:
    """Wait for it."""
    end = time.monotonic() + seconds
    while not right():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_head_of_more_than_16_kib_is_refused_whole_or_in_parts() -> None:
    with serving() as (address, _):
        body = json.dumps(ASKED).encode()
        assert b" 200 " in raw(address, post(body, b"x: " + b"y" * 16_000))[:20]
        long = post(body, b"x: " + b"y" * 17_000)
        assert b" 431 " in raw(address, long)[:20]
        head = long.partition(b"\r\n\r\n")[0]
        said = raw(address, head)  # its end does not come
        assert b" 400 " in said[:20] or said == b""  # reset, where it was still being sent


def test_a_client_that_half_closes_gets_its_answer_and_one_that_left_is_noticed() -> None:
    generator = Backwards(pace=0.05)
    with serving(generator) as (address, server):
        kept = post(json.dumps(ASKED).encode()).replace(b"connection: close\r\n", b"")
        for whole in (
            post(json.dumps(ASKED).encode()),
            kept,
            post(json.dumps(ASKED | {"stream": True}).encode()),
        ):
            said = raw(address, whole, shut=True)
            assert said.startswith(b"HTTP/1.1 100") and b"\r\n\r\nHTTP/1.1 200 OK" in said
            assert (b'"text":"cbacb"' in said) != (b"data: [DONE]" in said)
        # knows no 100
        assert raw(address, kept.replace(b"HTTP/1.1", b"HTTP/1.0"), shut=True) == b""
        assert raw(address, kept[:-5], shut=True) == b""  # a request that is not whole
        host, port = address.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(post(json.dumps(ASKED | {"max_tokens": 500}).encode()))
            until(lambda: len(generator.open) == 1)
        until(lambda: not generator.open and not server.server_state.connections, 5.0)


def test_clients_that_reset_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    generator = Backwards(most_running=64)
    asked = ASKED | {"max_tokens": 500, "stream": True, "n": 30, "logprobs": 5}
    with serving(generator) as (address, server):
        host, port = address.removeprefix("http://").split(":")
        for _ in range(3):
            with socket.create_connection((host, int(port))) as connection:
                connection.sendall(post(json.dumps(asked).encode()))
                connection.recv(1 << 12)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            until(lambda: not generator.open and not server.server_state.connections)
        assert ask(address, "/health")[0] == 200
    assert [r.getMessage() for r in caplog.records if r.name == "asyncio"] == []
