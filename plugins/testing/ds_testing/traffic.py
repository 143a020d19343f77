"""What is sent between ranks, for tests: an interceptor that notes every collective of this
process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ds_core import comm


@dataclass(frozen=True, slots=True)
class SentCollective:
    """One collective.

    bytes: of the whole message, of all `ranks` together.
    label: what it was for, or "".
    """

    op: str
    bytes: int
    label: str
    ranks: int = 1


class Traffic(comm.Interceptor):
    """``with Traffic() as traffic: ...``, or `ds_core.comm.add_interceptor`; every rank does it.

    sent: the collectives so far, in order; clear it when you like.
    """

    def __init__(self) -> None:
        self.sent: list[SentCollective] = []

    def around(self, collective: comm.Collective, call: Callable[[], Any]) -> Any:
        """Note one collective, as it is called."""
        size = 0 if collective.message is None else collective.message.nbytes
        self.sent.append(
            SentCollective(collective.op, size, collective.label, collective.group.size())
        )
        return call()

    def __enter__(self) -> Traffic:
        comm.add_interceptor(self)
        return self

    def __exit__(self, *error: object) -> None:
        comm.remove_interceptor(self)
