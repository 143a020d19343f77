"""Hostile requests, made from numbers: the same number is the same request."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import struct

from serving import post

__all__ = ["attack"]

GOOD = {"model": "backwards", "prompt": "abc", "max_tokens": 3}
VALUES = [
    None, True, -1, 0, 1, 2**63, 10**400, 1e308, "", "x", "\ud800", "\u0000", "💥" * 50, [], [[]], [1, "a"],
    [None], {}, {"": {}}, [[1], ["a"]], "a" * 5_000, [1] * 3_000, "NaN", {"include_usage": True}, [{"role": "user"}],
]  # fmt: skip
FIELDS = [
    "model", "prompt", "max_tokens", "n", "temperature", "top_p", "stop", "seed", "stream", "logprobs", "messages",
    "stream_options", "presence_penalty", "echo", "user", "tools", "x", "__proto__", "model_config", "",
]  # fmt: skip


def attack(address: str, number: int) -> bytes:
    """Do attack `number` on a model of the name `backwards`; the first bytes of what the server
    says.
    """
    chance = random.Random(number)
    kind = KINDS[number % len(KINDS)]
    host, port = address.removeprefix("http://").split(":")
    with (
        socket.create_connection((host, int(port)), timeout=1) as connection,
        contextlib.suppress(OSError),
    ):
        connection.sendall(kind(chance))
        if kind in LEAVE:
            if kind is _stream:
                connection.recv(1 << 12)
            if chance.random() < 0.5:  # not goodbye, but reset
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return b""
        if chance.random() < 0.3:
            connection.shutdown(socket.SHUT_WR)
        return connection.recv(64)
    return b""


def _wrong_types(chance: random.Random) -> bytes:
    body = GOOD | {
        chance.choice(FIELDS): chance.choice(VALUES) for _ in range(chance.randint(1, 3))
    }
    return post(json.dumps(body).encode())


def _broken_json(chance: random.Random) -> bytes:
    body = bytearray(json.dumps(GOOD).encode())
    for _ in range(chance.randint(1, 6)):
        body[chance.randrange(len(body))] = chance.randrange(256)
    return post(bytes(body))


def _deep(chance: random.Random) -> bytes:
    depth = chance.choice([100, 10_000, 200_000])
    return post(
        chance.choice(
            [b"[" * depth, b'{"a":' * depth, b'{"prompt":' + b"[" * depth + b"]" * depth + b"}"]
        )
    )


def _numbers(chance: random.Random) -> bytes:
    value = chance.choice(
        ["NaN", "-Infinity", "1" * 10_000, "1e99999", "0x10", "01", "1.", "-", "tru"]
    )
    return post(f'{{"model":"backwards","prompt":"a","temperature":{value}}}'.encode())


def _large(chance: random.Random) -> bytes:
    if chance.random() < 0.5:  # says that it is, and is not
        return post(b"{}").replace(
            b"content-length: 2", b"content-length: %d" % chance.choice([1 << 21, 1 << 40, 10**30])
        )
    return post(json.dumps(GOOD | {"prompt": "é " * chance.choice([2_000, 100_000])}).encode())


def _noise(chance: random.Random) -> bytes:
    start = chance.choice(
        [
            b"",
            b"GET / HTTP/1.1\r\n",
            b"\x16\x03\x01",
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n",
        ]
    )
    return start + chance.randbytes(chance.randint(1, 3_000)) + b"\r\n\r\n"


def _heads(chance: random.Random) -> bytes:
    wrong = chance.choice(
        [
            b"content-length: -1",
            b"content-length: 1, 2",
            b"transfer-encoding: gzip",
            b"upgrade: websocket",
            b"x: " + b"y" * 70_000,
            b"expect: 100-continue",
            b"a b: c",
            b"host: localhost:99999999",
            b"connection: upgrade",
        ]
    )
    return post(json.dumps(GOOD).encode(), wrong)


def _chunks(chance: random.Random) -> bytes:
    head = post(b"").replace(b"content-length: 0", b"transfer-encoding: chunked")
    return head + chance.choice(
        [
            b"zz\r\n",
            b"-1\r\n",
            b"ffffffffffffffff\r\n",
            b"2\r\n{}\r\n0\r\n\r\n",
            b"1;" + b"a" * 9_000,
        ]
    )


def _paths(chance: random.Random) -> bytes:
    paths = [
        b"/../../etc/passwd",
        b"/v1/models/" + b"%00" * 9,
        b"/%ff",
        b"//x",
        b"*",
        b"/v1/chat/completions?" + b"a" * 3_000,
    ]
    method = chance.choice(
        [b"GET", b"POST", b"PUT", b"DELETE", b"HEAD", b"OPTIONS", b"TRACE", b"CONNECT", b"QUX"]
    )
    return (
        method
        + b" "
        + chance.choice(paths)
        + b" HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    )


def _pipelined(chance: random.Random) -> bytes:
    return post(json.dumps(GOOD).encode()).replace(b"connection: close\r\n", b"") * chance.randint(
        2, 9
    ) + post(b"{}")


def _part(chance: random.Random) -> bytes:
    whole = post(json.dumps(GOOD | {"max_tokens": 100}).encode())
    return whole[: chance.randrange(len(whole))]


def _stream(chance: random.Random) -> bytes:
    return post(
        json.dumps(GOOD | {"max_tokens": 100, "stream": True, "n": chance.randint(1, 4)}).encode()
    )


def _wait(chance: random.Random) -> bytes:
    return post(json.dumps(GOOD | {"max_tokens": 100, "n": chance.randint(1, 9)}).encode())


LEAVE = (_part, _stream, _wait)
KINDS = (
    _wrong_types,
    _broken_json,
    _deep,
    _numbers,
    _large,
    _noise,
    _heads,
    _chunks,
    _paths,
    _pipelined,
    *LEAVE,
)
