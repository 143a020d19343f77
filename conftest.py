"""For every test folder of this repository."""

from __future__ import annotations

import gc
import os
import sys
from collections import defaultdict
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


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker that this repository has beside those of ds_testing."""
    config.addinivalue_line(
        "markers",
        "fast_cases(*ids, **ids_by_test): the cases of a parametrised test that `make test` runs; "
        "the others are slow. On a class, by the names of its tests: test_name=() makes all of one slow",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark as slow what `fast_cases` does not name.

    Raises UsageError for a name that no case has, unless cases were chosen by ``::``.
    """
    named: dict[str, set[str]] = {}
    found: dict[str, set[str]] = defaultdict(set)
    for item in items:
        case = getattr(item, "callspec", None)
        test = getattr(item, "originalname", "")
        marks = [m.args or m.kwargs.get(test) for m in item.iter_markers("fast_cases")]
        chosen = next((ids for ids in marks if ids is not None), None)
        if chosen is None:
            continue
        if case is not None:
            whole = item.nodeid.partition("[")[0]
            named[whole] = set(chosen)
            found[whole].add(case.id)
        if case is None or case.id not in chosen:
            item.add_marker(pytest.mark.slow)
    unknown = {test: ids - found[test] for test, ids in named.items() if ids - found[test]}
    if unknown and not any("::" in argument for argument in config.args):
        raise pytest.UsageError(f"fast_cases names cases that there are not: {unknown}")


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
