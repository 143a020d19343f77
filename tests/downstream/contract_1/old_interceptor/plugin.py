"""The declaration of old-interceptor: its section and its interceptor (torch-free)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from pydantic import Field

from ds_core.config import Section

if TYPE_CHECKING:
    from ds_core.comm.interceptor import Interceptor
    from ds_core.config import RunConfig


class Settings(Section):
    """The section ``old_interceptor``."""

    seconds: float = Field(1.0, gt=0, description="Collectives that take longer to call are logged.")


def ds_config() -> type[Settings]:
    """The section's model."""
    return Settings


def ds_interceptors(config: RunConfig) -> Iterable[Interceptor]:
    """One for the process: it stays when an engine is gone, and serves the next one."""
    from ds_core import comm
    from old_interceptor.interceptor import OldInterceptor

    settings = config.section("old_interceptor")
    assert isinstance(settings, Settings)
    installed = [found for found in comm.interceptors() if isinstance(found, OldInterceptor)]
    return installed or [OldInterceptor(settings.seconds)]
