"""What a request can be refused with, in the shape that clients of OpenAI's protocol read."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from typing import Any

from ds_core.errors import DSError

_KINDS = {
    401: "authentication_error",
    429: "requests",
    500: "server_error",
    503: "server_error",
    504: "server_error",
}


@dataclass(eq=False)
class Refusal(Exception):
    """An answer with an error."""

    # The HTTP status code.
    status: int
    message: str
    # OpenAI's word for the error, where it has one.
    code: str | None = None
    # The field of the request at fault.
    param: str | None = None
    # Seconds after which it may succeed.
    retry_after: int | None = None

    def __str__(self) -> str:
        return self.message

    def body(self) -> dict[str, Any]:
        """The JSON object of the answer."""
        kind = _KINDS.get(self.status, "invalid_request_error")
        return {
            "error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        }

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Headers besides those of every answer."""
        found = (
            [] if self.retry_after is None else [(b"retry-after", str(self.retry_after).encode())]
        )
        return [*found, (b"www-authenticate", b"Bearer")] if self.status == 401 else found


def describe(error: BaseException) -> str:
    """`error` for the log: the text of one of ours; of another its kind and place, since its text
    may repeat a request.
    """
    if isinstance(error, DSError):
        return str(error)
    return f"{type(error).__name__}\n{''.join(traceback.format_tb(error.__traceback__))}"
