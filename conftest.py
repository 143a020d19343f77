"""For every test folder of this repository."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
from hypothesis import HealthCheck, settings

# No example has a time limit (a busy machine would fail it), and CI tries the same examples every time.
settings.register_profile("ds", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("ds"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "ds")


@pytest.fixture
def full_at() -> Callable[[int], AbstractContextManager[None]]:
    """``with full_at(size)``: every file of this process is full at `size` bytes.

    A write beyond it is cut short, and the next one fails.
    """

    @contextmanager
    def limit(size: int) -> Iterator[None]:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    return limit
