"""What dscore-comms-logger offers to ds_core: the section ``comms_logger`` and its interceptor
(torch-free).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import BaseModel

    from ds_core.comm.interceptor import Interceptor
    from ds_core.config import RunConfig
    from ds_core.errors import Problem


def ds_config() -> type[BaseModel]:
    """The section ``comms_logger``."""
    from ds_comms_logger.config import CommsLogger

    return CommsLogger


def ds_check(config: RunConfig) -> Iterable[Problem]:
    """Names in ``prof_ops`` that are no collectives."""
    from ds_comms_logger.config import CommsLogger
    from ds_comms_logger.log import unknown_operations

    section = config.section(CommsLogger)
    return unknown_operations(section) if section is not None else ()


def ds_interceptors(config: RunConfig) -> Iterable[Interceptor]:
    """The log of this process, with ``comms_logger.enabled``."""
    from ds_comms_logger.config import CommsLogger
    from ds_comms_logger.log import configure

    section = config.section(CommsLogger)
    log = configure(section) if section is not None else None
    return () if log is None else (log,)
