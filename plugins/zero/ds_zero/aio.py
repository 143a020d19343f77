"""The section ``aio``, which only offload to NVMe reads; front-ends write it always (torch-free)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel

from ds_core.config import Section, option

__all__ = ["AsyncIO", "ds_config"]


def ds_config() -> type[BaseModel]:
    """The section ``aio``."""
    return AsyncIO


class AsyncIO(Section):
    """Asynchronous reads and writes of offload to NVMe."""

    block_size: int = option(1_048_576, "Bytes per request.", gt=0)
    queue_depth: int = option(8, "Requests under way.", gt=0)
    intra_op_parallelism: int = option(1, "Threads per request.", gt=0, alias="thread_count")
    single_submit: bool = option(False, "Submit one request at a time.")
    overlap_events: bool = option(True, "Submit without waiting for earlier requests.")
    use_gds: bool = option(False, "GPUDirect storage.")

    def remarks(self, given: Any) -> Iterable[tuple[str, str]]:
        """All of it, as long as there is no offload to NVMe."""
        if given:
            yield "", "has no effect: there is no offload to NVMe"
