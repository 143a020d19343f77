"""Connections with patience: a request that does not come, or an answer that is not read, ends its
connection.

[Note: half closed] A client that has left and one that only sends nothing more look alike: both
sent the end of their stream. What is written to the first comes back as an error. So until its
answer begins, such a connection is written to from time to time: "100 Continue", which clients pass
over.
"""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

_BODY = (
    b'{"error":{"message":"too many connections","type":"server_error","param":null,"code":null}}'
)
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: "
    b"1\r\nconnection: close\r\n"
    b"content-length: %d\r\n\r\n%b" % (len(_BODY), _BODY)
)


_AGAIN = 0.5
"""Seconds between two looks at whether the client of a half-closed connection is there."""


class Patient(H11Protocol):
    """One connection. Its timer runs while it should send a request's head, or should read."""

    # The most connections at a time.
    most: int
    # Seconds for which a connection may make no progress.
    patience: float

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._timer: asyncio.TimerHandle | None = None
        self._half_closed = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected: it has `patience` seconds for the head of a request."""
        super().connection_made(transport)
        # At once, in bytes that were made before: a flood of connections must cost little.
        if len(self.connections) > self.most:
            transport.write(_FULL)
            transport.close()
        self._wait()

    def data_received(self, data: bytes) -> None:
        """Something came: of the head that is waited for, or while an answer is made."""
        super().data_received(data)
        # Between requests: the next head must come in time. During an answer: the client lives.
        if self.cycle is None or self.cycle.response_complete:
            self._wait()  # time for the head to be completed; the body has a limit of its own
        elif not self.flow.write_paused:
            self._go_on()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Whether the connection stays open: where a whole request waits for its answer. [Note:
        half closed]
        """
        cycle = self.cycle
        waits = cycle is not None and not cycle.response_complete and not cycle.more_body
        # Clients of HTTP/1.0 do not know what is written to see whether they are there.
        if not waits or self.scope["http_version"] == "1.0":
            return False
        if not self._half_closed:
            self._half_closed = True
            self._look()
        return True

    def _look(self) -> None:
        """Write to a client that may have left; its system then ends the connection."""
        if self.transport.is_closing():
            return
        if not self.cycle.response_started:
            self.transport.write(
                self.conn.send(h11.InformationalResponse(status_code=100, headers=[]))
            )
        self.loop.call_later(_AGAIN, self._look)

    def on_response_complete(self) -> None:
        """An answer is complete: a half-closed connection has no more to do."""
        super().on_response_complete()
        # Requests that came before the end are answered; none can come after it.
        if self._half_closed and self.cycle.response_complete:
            self.transport.close()

    def pause_writing(self) -> None:
        """The client does not read, and the answer waits for it."""
        super().pause_writing()
        self._wait()

    def resume_writing(self) -> None:
        """The client reads on."""
        super().resume_writing()
        self._go_on()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection has ended, and with it the timer."""
        super().connection_lost(exc)
        self._go_on()

    def _wait(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(self.patience, self.transport.abort)

    def _go_on(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def protocol(most: int, patience: float) -> type[H11Protocol]:
    """uvicorn's protocol for `most` connections at a time, of which each may be stuck for
    `patience` seconds.
    """
    # uvicorn is given a class, which it makes an object of for each connection.
    return type("Patient", (Patient,), {"most": most, "patience": patience})
