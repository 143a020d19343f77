"""Plugins of strangers, frozen as they were written, go on working: with warnings, and with their
own tests.

``contract_1``: what ``dscore new plugin`` wrote of every kind at 89abd79, the last commit of the
first contract, with the tests that it wrote. ``before_kits``: the plugins of docs/plugins.md before
f2f9d2e, when kits were parts of the core. No file in these folders is ever changed; a new contract
adds a folder.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from frozen import HERE, installed, passed


@pytest.fixture(scope="module")
def contract_1(tmp_path_factory: pytest.TempPathFactory) -> Path:
    site = tmp_path_factory.mktemp("contract_1") / "site"
    assert len(installed(HERE / "contract_1", site)) == 29
    return site


CHANGED = (
    "partitioner",
    "engine_methods",
    "observer",
    "gradients",
    "compile_pass",
    "memory",
    "runner",
)
"""The kinds whose contract has changed since: their own tests run with every commit."""


@pytest.mark.slow
def test_contract_1_is_declared_and_what_changed_since_passes_its_own_tests(
    contract_1: Path,
) -> None:
    """In one run, as one process imports torch once: the declarations of every kind, and all tests
    of the kinds in `CHANGED` but the long ones.
    """
    declarations = "TestPlugin and not heavy and not import"
    kinds = " or ".join(f"test_old_{kind}" for kind in CHANGED)
    long = "test_old_partitioner and (test_trains_as_one_process or products)"
    passed(
        contract_1,
        "-k",
        f"({declarations}) or (({kinds}) and not ({long}))",
        *map(str, sorted(contract_1.glob("test_*.py"))),
    )


@pytest.mark.slow
def test_everything_of_contract_1_passes_its_own_tests(contract_1: Path) -> None:
    passed(contract_1, *map(str, sorted(contract_1.glob("test_*.py"))))
