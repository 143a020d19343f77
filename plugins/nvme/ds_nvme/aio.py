"""The section ``aio``: how the store ``nvme`` reads and writes (torch-free)."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, field_validator

from ds_core.config import Section, option
from ds_core.errors import Problem
from ds_core.process import log_once
from ds_nvme.files import ALIGNMENT, padded

if TYPE_CHECKING:
    from ds_core.config import RunConfig
    from ds_core.plugins import Plugins

log = logging.getLogger("ds_nvme")


def ds_config() -> type[BaseModel]:
    """The section ``aio``."""
    return AsyncIO


class AsyncIO(Section):
    """Asynchronous reads and writes of files.

    Front-ends write this section always; it is read where NVMe is used.
    """

    block_size: int = option(1_048_576, "Bytes per request.", gt=0)
    queue_depth: int = option(8, "Requests under way.", gt=0)
    intra_op_parallelism: int = option(
        1, "Threads that share each read or write.", gt=0, alias="thread_count"
    )
    single_submit: bool = option(False, "Submit one request at a time.")
    overlap_events: bool = option(True, "Submit without waiting for earlier requests.")
    use_gds: bool = option(False, "GPUDirect storage; it is not supported.")
    engine: Literal["io_uring", "kernel aio", "threads", "python threads"] | None = option(
        None, "Who brings requests to the kernel; null: the first of these that works here."
    )
    checksum: bool | None = option(
        None, "Compare checksums of what is read with what was written; null: yes."
    )

    @field_validator("block_size")
    @classmethod
    def _aligned(cls, value: int) -> int:
        if value % ALIGNMENT:
            raise ValueError(f"must be a multiple of {ALIGNMENT}, as {padded(value)} is")
        return value


def ds_check(config: RunConfig, plugins: Plugins) -> Iterator[Problem]:
    """Says once where the section has nothing to do; else refuses GPUDirect."""
    section = config.section(AsyncIO)
    if not _uses_nvme(config.raw):
        log_once(log, logging.INFO, "section aio has no effect: nothing is offloaded to NVMe")
    elif section is not None and section.use_gds:
        yield Problem(
            "aio.use_gds",
            "GPUDirect storage is not supported: files are read into host memory",
            "set it to false",
        )


def _uses_nvme(given: Any) -> bool:
    """Whether any ``device`` in a config is ``nvme``."""
    if isinstance(given, Mapping):
        device = given.get("device")
        return (isinstance(device, str) and device.lower() == "nvme") or any(
            map(_uses_nvme, given.values())
        )
    return isinstance(given, list) and any(map(_uses_nvme, given))
