"""What several test folders share."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def building() -> ModuleType:
    """The module ``tests/building.py``: test folders are no packages, so it is loaded by its path."""
    spec = importlib.util.spec_from_file_location("ds_tests_building", Path(__file__).with_name("building.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
