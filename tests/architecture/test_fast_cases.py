"""The marker `fast_cases`: which cases of a parametrised test `make test` runs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

SUITE = """
import pytest

@pytest.mark.fast_cases("1-a", "2-b")
@pytest.mark.parametrize("name", ["a", "b"])
@pytest.mark.parametrize("number", [1, 2])
def test_matrix(number, name): ...

def test_alone(): ...

class Kit:
    @pytest.mark.parametrize("name", ["a", "b"])
    def test_cases(self, name): ...
    def test_long(self): ...
    def test_short(self): ...

@pytest.mark.fast_cases(test_cases=("a",), test_long=())
class TestMine(Kit): ...
"""


@pytest.fixture
def conftest(request: pytest.FixtureRequest) -> Any:
    plugins = request.config.pluginmanager.get_plugins()
    return next(p for p in plugins if hasattr(p, "full_at") and hasattr(p, "pytest_configure"))


def collected(text: str, folder: Path, request: pytest.FixtureRequest) -> list[pytest.Item]:
    """The tests of a module with `text`."""
    file = folder / "test_suite.py"
    file.write_text(text)
    module = pytest.Module.from_parent(request.session, path=file)
    return list(request.session.genitems(module))


def test_cases_that_are_not_named_are_slow(
    conftest: Any, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    items = collected(SUITE, tmp_path, request)
    conftest.pytest_collection_modifyitems(SimpleNamespace(args=["tests"]), items)
    fast = [item.name for item in items if item.get_closest_marker("slow") is None]
    assert sorted(fast) == sorted(
        ["test_matrix[1-a]", "test_matrix[2-b]", "test_alone", "test_cases[a]", "test_short"]
    )


def test_a_name_of_no_case_is_an_error(
    conftest: Any, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    items = collected(SUITE.replace('"2-b"', '"3-b"'), tmp_path, request)
    with pytest.raises(pytest.UsageError, match="cases that there are not.*3-b"):
        conftest.pytest_collection_modifyitems(SimpleNamespace(args=["tests"]), items)
    # Where one case was asked for, the others are not there to be compared with.
    conftest.pytest_collection_modifyitems(SimpleNamespace(args=["x.py::test_matrix[1-a]"]), items)
