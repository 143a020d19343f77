"""For every test folder of this repository."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
from hypothesis import HealthCheck, settings

# Before torch is loaded: tests' tensors are small, and further threads would only burn CPU while
# they wait for work. Those of a test that wants more sleep instead.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Tests start hundreds of short processes: without bytecode files each would compile our packages anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# No example has a time limit (a busy machine would fail it), and CI tries the same examples every
# time.
settings.register_profile("ds", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("ds"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "ds")


def pytest_collection_finish() -> None:
    """What was imported and collected stays to the end; a collection of garbage need not go through
    it each time.
    """
    gc.freeze()


@pytest.fixture
def full_at() -> Callable[[int], AbstractContextManager[None]]:
    """`ds_testing.processes.full_at`."""
    from ds_testing.processes import full_at

    return full_at
