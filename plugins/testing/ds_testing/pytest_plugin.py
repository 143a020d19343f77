"""The pytest plugin of ds_core (entry point ``ds_core`` in group ``pytest11``).

Every pytest run of an environment with ds_core imports this module, so it imports nothing but
pytest.
"""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Callable, Generator, Iterator
from typing import Any, Protocol

import pytest


class Ranks(Protocol):
    """What the fixture `ranks` gives: see `ds_testing.run_ranks`."""

    def __call__(
        self, size: int, fn: Callable[..., Any], *args: Any, timeout: float = 300.0
    ) -> list[Any]:
        """Call ``fn(*args)`` on `size` gloo ranks; the results by rank."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """The packages whose shapes in signatures are checked."""
    parser.addini(
        "ds_shapes", "packages whose shapes in signatures are checked (ds_testing.shapes)", "args"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers that the suites of ds_core and of its plugins use; check shapes."""
    if packages := config.getini("ds_shapes"):
        from ds_testing import shapes

        shapes.install(packages)
        os.environ[shapes.ENV] = " ".join(packages)  # for the workers of ds_testing.pool
    config.addinivalue_line(
        "markers", "slow: takes more than a few seconds; leave out with -m 'not slow'"
    )
    config.addinivalue_line("markers", "gpu: needs a GPU; leave out with -m 'not gpu'")
    config.addinivalue_line(
        "markers", "integration: released programs of others, run on ds_core; make test-frontends"
    )
    config.addinivalue_line(
        "markers", "hosts: launchers on several hosts in namespaces; make test-hosts"
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Below a failure in a test of a kit: what the kit asks for, which is the test's docstring."""
    report = yield
    function: Any = getattr(item, "function", None)
    if report.failed and str(getattr(function, "__module__", "")).startswith("ds_testing."):
        kit = function.__qualname__.partition(".")[0]
        about = " ".join((inspect.getdoc(function) or "").split())
        report.sections.append(
            (f"what {kit} asks for", f"{about}\n`python -m pydoc ds_testing.{kit}` has all of it.")
        )
    return report


@pytest.fixture(scope="session")
def _pools() -> Iterator[Ranks]:
    from ds_testing.pool import close_pools, run_ranks

    yield run_ranks
    close_pools()


@pytest.fixture
def ranks(_pools: Ranks) -> Ranks:
    """``ranks(size, fn, *args, timeout=300.0)``: run a module-level function on gloo ranks kept for
    the session.
    """
    return _pools


@pytest.fixture
def clean_ds() -> Iterator[None]:
    """Start and end the test without process-wide ds_core state (``ds_core.reset()``)."""
    _reset()
    yield
    _reset()


def _reset() -> None:
    reset = getattr(importlib.import_module("ds_core"), "reset", None)
    if reset is not None:
        reset()
