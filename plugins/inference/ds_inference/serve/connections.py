"""Connections with patience: a request that does not come, or an answer that is not read, ends its connection."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

__all__ = ["protocol"]

_BODY = b'{"error":{"message":"too many connections","type":"server_error","param":null,"code":null}}'
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\nconnection: close\r\n"
    b"content-length: %d\r\n\r\n%b" % (len(_BODY), _BODY)
)


def protocol(most: int, patience: float) -> type[H11Protocol]:
    """uvicorn's protocol for `most` connections at a time, of which each may be stuck for `patience` seconds."""

    class Patient(H11Protocol):
        """One connection. Its timer runs while it should send a request's head, or should read."""

        def __init__(self, *arguments: Any, **keywords: Any) -> None:
            super().__init__(*arguments, **keywords)
            self._timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > most:
                transport.write(_FULL)
                transport.close()
            self._wait()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.cycle is None or self.cycle.response_complete:
                self._wait()  # for the rest of a head; the body has a limit of its own
            elif not self.flow.write_paused:
                self._go_on()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._wait()

        def resume_writing(self) -> None:
            super().resume_writing()
            self._go_on()

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            self._go_on()

        def _wait(self) -> None:
            if self._timer is None:
                self._timer = self.loop.call_later(patience, self.transport.abort)

        def _go_on(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    return Patient
