"""What a request can be refused with, in the shape that clients of OpenAI's protocol read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["Refusal"]

_KINDS = {401: "authentication_error", 429: "requests", 500: "server_error", 503: "server_error", 504: "server_error"}


@dataclass(eq=False)
class Refusal(Exception):
    """An answer with `status`. param: the field of the request at fault. retry_after: in seconds it may be better."""

    status: int
    message: str
    code: str | None = None
    param: str | None = None
    retry_after: int | None = None

    def __str__(self) -> str:
        return self.message

    def body(self) -> dict[str, Any]:
        """The JSON object of the answer."""
        kind = _KINDS.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Headers besides those of every answer."""
        found = [] if self.retry_after is None else [(b"retry-after", str(self.retry_after).encode())]
        return [*found, (b"www-authenticate", b"Bearer")] if self.status == 401 else found
