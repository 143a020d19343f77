"""A real S3 server (moto's) in a process of its own, and a proxy before it that is slow and fails.

As a program it is the proxy: ``python object_server.py UPSTREAM SHARE LATENCY SEED`` prints its port
and relays HTTP requests, each after LATENCY seconds. The SHARE of them fails, in turn by an answer
503, by doing what was asked and closing the connection without an answer, and by breaking off in the
middle of the answer.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import random
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

BUCKET = "bucket"
KEYS = {"AWS_ACCESS_KEY_ID": "AKIDHUNTER2", "AWS_SECRET_ACCESS_KEY": "hunter2-secret"}
REGION = {"AWS_REGION": "us-east-1"}


@contextlib.contextmanager
def s3_server() -> Iterator[str]:
    """The address of a server with the empty bucket `BUCKET`."""
    command = [sys.executable, "-c", "from moto.server import main; main(['-p', '0'])"]
    with _program(command, r"Running on http://127.0.0.1:") as port:
        address = f"http://127.0.0.1:{port}"
        make = urllib.request.Request(f"{address}/{BUCKET}", method="PUT")
        with urllib.request.urlopen(make, timeout=30):
            yield address


@contextlib.contextmanager
def faulty_proxy(
    upstream: str, share: float = 0.05, latency: float = 0.05, seed: int = 0
) -> Iterator[str]:
    """The address of a proxy before `upstream`."""
    command = [sys.executable, __file__, upstream, str(share), str(latency), str(seed)]
    with _program(command, "port ") as port:
        yield f"http://127.0.0.1:{port}"


@contextlib.contextmanager
def _program(command: list[str], before: str) -> Iterator[int]:
    """A process that prints its port behind `before`."""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            assert process.stdout is not None
            text = ""
            for line in process.stdout:
                text += line
                if before in line:
                    port = int(line.partition(before)[2].strip().rstrip("/"))
                    break
            else:
                raise AssertionError(f"{command} has ended: {text}")
            # Its log is read on, or it would wait for that.
            threading.Thread(target=_drain, args=(process.stdout,), daemon=True).start()
            yield port
        finally:
            process.kill()


def _drain(stream: Any) -> None:
    with contextlib.suppress(ValueError):
        for _ in stream:
            pass


@contextlib.contextmanager
def environment(address: str, **more: str) -> Iterator[None]:
    """The variables that lead to the server at `address`."""
    new = KEYS | REGION | {"AWS_ENDPOINT_URL": address} | more
    old = {name: os.environ.get(name) for name in new}
    os.environ.update(new)
    try:
        yield
    finally:
        for name, value in old.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def s3(address: str, method: str, path: str, body: bytes = b"", query: str = "") -> bytes:
    """A plain request, past the code that is tested."""
    url = f"{address}/{BUCKET}/{path}{query}"
    # Any signature will do; without one it would be a stranger's request.
    signed = {"Authorization": "AWS4-HMAC-SHA256 Credential=a/20260101/us-east-1/s3/aws4_request"}
    sent = urllib.request.Request(url, data=body or None, method=method, headers=signed)
    with urllib.request.urlopen(sent, timeout=30) as answer:
        found: bytes = answer.read()
    return found


def keys(address: str, prefix: str = "") -> list[str]:
    """Every key, by a client of another make than the code that is tested."""
    import re

    text = s3(address, "GET", "", query=f"?list-type=2&max-keys=1000&prefix={prefix}").decode()
    return re.findall(r"<Key>([^<]*)</Key>", text)


class _Relay(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    upstream = ""
    share = 0.0
    latency = 0.0
    draw = random.Random(0)

    def log_message(self, *_: Any) -> None: ...

    def _relay(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        time.sleep(self.latency)
        fault = (
            self.draw.choice(("refuse", "lose", "cut")) if self.draw.random() < self.share else ""
        )
        if fault == "refuse":
            self.send_response(503)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        connection = http.client.HTTPConnection(self.upstream, timeout=60)
        connection.request(self.command, self.path, body or None, dict(self.headers))
        answer = connection.getresponse()
        data = answer.read()
        connection.close()
        if fault == "lose":
            self.close_connection = True
            return
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("connection", "transfer-encoding", "content-length"):
                self.send_header(name, value)
        length = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(data))
        self.send_header("Content-Length", length or "0")
        self.end_headers()
        if fault == "cut":
            self.wfile.write(data[: len(data) // 2])
            self.close_connection = True
            return
        self.wfile.write(data)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _relay


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, *_: Any) -> None: ...


def main(upstream: str, share: str, latency: str, seed: str) -> None:
    _Relay.upstream = upstream.removeprefix("http://")
    _Relay.share = float(share)
    _Relay.latency = float(latency)
    _Relay.draw = random.Random(int(seed))
    server = _Server(("127.0.0.1", 0), _Relay)
    print(f"port {server.server_address[1]}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
