"""The pytest plugin in a pytest of its own, and the lazy exports of `ds_testing`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import ds_testing
import pytest

ROOT = Path(__file__).parents[3]

SUITE = """
import os
import sys

import pytest
import torch.distributed as dist


def rank():
    return dist.get_rank(), os.getpid()


def boom():
    raise ValueError("from far away")


def test_ranks(ranks):
    first = ranks(2, rank)
    assert [r for r, _ in first] == [0, 1]
    assert ranks(2, rank, timeout=300.0) == first
    open("pids", "w").write(" ".join(str(p) for _, p in first))


@pytest.mark.slow
@pytest.mark.gpu
def test_clean(clean_ds):
    assert len(RESETS) == 1


def test_reset_after():
    assert len(RESETS) == 2


def test_failure_is_shown(ranks):
    ranks(1, boom)


RESETS = []
import ds_core
ds_core.reset = lambda: RESETS.append(1)
"""


def pytest_run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = dict(os.environ, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1", PYTHONPATH=str(ROOT))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "ds_testing.pytest_plugin",
        "-p",
        "no:cacheprovider",
    ]
    command += arguments
    return subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.slow
def test_fixtures_and_markers(tmp_path: Path) -> None:
    (tmp_path / "test_suite.py").write_text(SUITE)
    done = pytest_run(tmp_path, "--strict-markers", "-q")
    assert "1 failed, 3 passed" in done.stdout, done.stdout + done.stderr
    assert "rank 0 raised ValueError: from far away" in done.stdout
    for pid in (tmp_path / "pids").read_text().split():
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)


@pytest.mark.slow
def test_a_failure_of_a_kit_says_what_the_kit_asks_for(tmp_path: Path) -> None:
    suite = (
        "from ds_testing import KernelConformance\nclass TestMine(KernelConformance): "
        "entries = "
        "lambda self: []\n"
    )
    (tmp_path / "test_suite.py").write_text(suite + "def test_own(): assert False\n")
    said = pytest_run(tmp_path, "-q", "-k", "offers or own").stdout
    assert said.count("what KernelConformance asks for") == 1 and "2 failed" in said
    assert (
        "At least one entry is for this device" in said
        and "pydoc ds_testing.KernelConformance" in said
    )


def test_pytest_starts_without_torch(tmp_path: Path) -> None:
    (tmp_path / "test_light.py").write_text(
        "import sys\ndef test_light(): assert 'torch' not in sys.modules\n"
    )
    done = pytest_run(tmp_path, "-q")
    assert done.returncode == 0, done.stdout + done.stderr


def test_exports_are_lazy() -> None:
    code = "import json, sys, ds_testing; print(json.dumps(sorted(sys.modules)))"
    env = dict(os.environ, PYTHONPATH=str(ROOT))
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    loaded = set(json.loads(done.stdout))
    assert not loaded & {
        "torch",
        "pytest",
        "pydantic",
        "ds_testing.pool",
        "ds_testing.kits.tools.plugin",
    }


def test_every_export_is_there() -> None:
    for name in ds_testing.__all__:
        assert getattr(ds_testing, name).__name__ == name
        assert name in dir(ds_testing)
    with pytest.raises(AttributeError, match="no attribute 'NoSuchKit'"):
        ds_testing.NoSuchKit
