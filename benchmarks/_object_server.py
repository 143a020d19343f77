"""A small S3 server in memory, and a link of a given rate before it, each a process.

moto's server, which the tests use, takes 60 to 90 MB/s here, less than a link of 1 Gbit/s carries.
This one does what a checkpoint needs (parts, ranges, conditional puts, lists) and keeps up.

    python _object_server.py server            prints its port
    python _object_server.py link PORT RATE    the same; RATE in bytes/s, in each direction
"""

from __future__ import annotations

import hashlib
import re
import selectors
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

__all__ = ["Link", "Store"]


class Store(BaseHTTPRequestHandler):
    """Answers the requests of one connection."""

    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 20
    objects: dict[str, bytes] = {}  # noqa: RUF012
    parts: dict[str, dict[int, bytes]] = {}  # noqa: RUF012
    lock = threading.Lock()

    def log_message(self, *_: Any) -> None:
        """Nothing."""

    def _asked(self) -> tuple[str, dict[str, list[str]], bytes]:
        address = urlsplit(self.path)
        key = unquote(address.path).lstrip("/").partition("/")[2]
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        return key, parse_qs(address.query, keep_blank_values=True), body

    def _answer(self, status: int, body: bytes | memoryview = b"", **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", headers.pop("length", str(len(body))))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_PUT(self) -> None:
        """An object, or a part of one."""
        key, query, body = self._asked()
        tag = f'"{hashlib.blake2b(body[:4096] + body[-4096:]).hexdigest()[:32]}"'
        with self.lock:
            if "uploadId" in query:
                self.parts[query["uploadId"][0]][int(query["partNumber"][0])] = body
            else:
                held = self._tag(key)
                wanted = self.headers.get("If-Match")
                exists = self.headers.get("If-None-Match") == "*" and held is not None
                if exists or wanted not in (None, held):
                    self._answer(412, b"<Error><Code>PreconditionFailed</Code></Error>")
                    return
                self.objects[key] = body
                tag = self._tag(key) or tag
        self._answer(200, ETag=tag)

    def _tag(self, key: str) -> str | None:
        data = self.objects.get(key)
        if data is None:
            return None
        text = data[:4096] + data[-4096:] + str(len(data)).encode()
        return f'"{hashlib.blake2b(text).hexdigest()[:32]}"'

    def do_POST(self) -> None:
        """The beginning or the end of an upload in parts; or many removals."""
        key, query, body = self._asked()
        if "delete" in query:
            rows = b""
            for name in re.findall(rb"<Key>([^<]*)</Key>", body):
                self.objects.pop(name.decode(), None)
                rows += b"<Deleted><Key>" + name + b"</Key></Deleted>"
            self._answer(200, b"<DeleteResult>" + rows + b"</DeleteResult>")
        elif "uploads" in query:
            upload = str(time.monotonic_ns())
            self.parts[upload] = {}
            text = f"<InitiateMultipartUploadResult><UploadId>{upload}</UploadId>"
            self._answer(200, f"{text}</InitiateMultipartUploadResult>".encode())
        else:
            several = self.parts.pop(query["uploadId"][0])
            self.objects[key] = b"".join(several[number] for number in sorted(several))
            text = f"<CompleteMultipartUploadResult><ETag>{self._tag(key)}</ETag>"
            self._answer(200, f"{text}</CompleteMultipartUploadResult>".encode())

    def do_DELETE(self) -> None:
        """One removal."""
        key, _, _ = self._asked()
        self.objects.pop(key, None)
        self._answer(204)

    def do_HEAD(self) -> None:
        """As GET."""
        self.do_GET()

    def do_GET(self) -> None:
        """An object or a range of it, or a list."""
        key, query, _ = self._asked()
        if not key:
            self._list(query)
            return
        data = self.objects.get(key)
        tag = self._tag(key)
        if data is None or tag is None:
            self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
            return
        if self.headers.get("If-Match") not in (None, tag):
            self._answer(412)
            return
        when = "Sun, 29 Nov 2026 00:00:00 GMT"
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if asked is None:
            self._answer(200, data, ETag=tag, Last_Modified=when)
            return
        start = int(asked[1])
        stop = min(int(asked[2]) + 1, len(data))
        where = f"bytes {start}-{stop - 1}/{len(data)}"
        part = memoryview(data)[start:stop]
        self._answer(206, part, ETag=tag, Last_Modified=when, Content_Range=where)

    def _list(self, query: dict[str, list[str]]) -> None:
        prefix = query.get("prefix", [""])[0]
        found = [key for key in sorted(self.objects) if key.startswith(prefix)]
        rows = ""
        if "delimiter" in query:
            folders = {
                key[len(prefix) :].split("/")[0] for key in found if "/" in key[len(prefix) :]
            }
            rows = "".join(
                f"<CommonPrefixes><Prefix>{prefix}{name}/</Prefix></CommonPrefixes>"
                for name in sorted(folders)
            )
            found = [key for key in found if "/" not in key[len(prefix) :]]
        for key in found:
            rows += (
                f"<Contents><Key>{key}</Key><LastModified>2026-11-29T00:00:00.000Z</LastModified>"
                f"<ETag>{self._tag(key)}</ETag><Size>{len(self.objects[key])}</Size></Contents>"
            )
        text = f"<ListBucketResult><IsTruncated>false</IsTruncated>{rows}</ListBucketResult>"
        self._answer(200, text.encode())


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def handle_error(self, *_: Any) -> None: ...


class Link:
    """Relays connections to a port of this host, at most `rate` bytes/s in each direction."""

    def __init__(self, port: int, rate: float) -> None:
        self._target = port
        self._rate = rate
        # When each direction is free again.
        self._free = [0.0, 0.0]
        self._selector = selectors.DefaultSelector()
        self._listen = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.port: int = self._listen.getsockname()[1]
        self._selector.register(self._listen, selectors.EVENT_READ)

    def run(self) -> None:
        """Relay until the process ends: one direction after the other, so that all share it."""
        while True:
            for key, _ in self._selector.select():
                if key.data is None:
                    self._accept()
                else:
                    self._move(key.fileobj, *key.data)

    def _accept(self) -> None:
        near, _ = self._listen.accept()
        far = socket.create_connection(("127.0.0.1", self._target))
        for end, other, way in ((near, far, 0), (far, near, 1)):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._selector.register(end, selectors.EVENT_READ, (other, way))

    def _move(self, source: Any, target: socket.socket, way: int) -> None:
        try:
            data = source.recv(1 << 17)
            if data:
                target.sendall(data)
        except OSError:
            data = b""
        if not data:
            for end in (source, target):
                self._selector.unregister(end)
                end.close()
            return
        now = time.monotonic()
        self._free[way] = max(self._free[way], now - 0.002) + len(data) / self._rate
        if (left := self._free[way] - now) > 0.001:
            time.sleep(left)


def main(kind: str, *arguments: str) -> None:
    """Serve until the process ends."""
    if kind == "link":
        link = Link(int(arguments[0]), float(arguments[1]))
        print(link.port, flush=True)
        link.run()
    server = _Server(("127.0.0.1", 0), Store)
    print(server.server_address[1], flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
