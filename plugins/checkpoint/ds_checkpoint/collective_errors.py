"""Steps that every rank takes, and that fail on all ranks when they fail on one."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any, TypeVar

from ds_core import comm
from ds_core.errors import CheckpointError

T = TypeVar("T")


def on_every_rank(
    action: str, work: Callable[[], T], report: Callable[[T], Any] = lambda _: None
) -> tuple[T, list[Any]]:
    """Do `work` on this rank and wait for the others; (its result, the JSON `report` of every
    rank). Collective.

    Whatever is raised anywhere becomes a CheckpointError on every rank, with the first such rank
    and the cause.
    """
    result: Any = None
    cause: Exception | None = None
    try:
        result = work()
        mine = {"report": report(result)}
    except Exception as error:  # whatever it is, the other ranks are waiting for word
        cause = error
        mine = _row(error)
    everyone = comm.all_gather_json(mine)
    _raise_first(action, {rank: row for rank, row in enumerate(everyone) if "error" in row}, cause)
    return result, [row["report"] for row in everyone]


def on_first_rank(action: str, work: Callable[[], Any]) -> Any:
    """Do `work` on rank 0; its JSON result on every rank.

    An error is raised on all of them. Collective.
    """
    cause: Exception | None = None
    answer: dict[str, Any] = {}
    if comm.rank() == 0:
        try:
            answer = {"result": work()}
        except Exception as error:  # as above
            cause = error
            answer = _row(error)
    answer = comm.all_gather_json(answer)[0]
    _raise_first(action, {0: answer} if "error" in answer else {}, cause)
    return answer["result"]


def describe(error: Exception) -> str:
    """The text of `error` for a log or another rank."""
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


def _row(error: Exception) -> dict[str, str]:
    return {"error": describe(error), "host": socket.gethostname()}


def _raise_first(action: str, errors: dict[int, dict[str, str]], cause: Exception | None) -> None:
    if not errors:
        return
    rank, row = min(errors.items())
    place = "" if row["host"] == socket.gethostname() else f" on {row['host']}"
    where = f"rank {rank}{place}: " if comm.world_size() > 1 else ""
    others = f" (and {len(errors) - 1} more ranks)" if len(errors) > 1 else ""
    raise CheckpointError(f"{action}: {where}{row['error']}{others}") from cause
