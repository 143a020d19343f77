"""Wheels that carry libraries, and the sdists that bring the build hook along."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from ds_kernel_kit import wheels

ROOT = Path(__file__).parents[3]
COMPILED = {"ds_nvme": ROOT / "plugins" / "nvme", "ds_ops_cpu": ROOT / "ops" / "cpu"}


def build_package(what: str, folder: Path, out: Path, **environment: str) -> Path:
    """Build a "wheel" or "sdist" of `folder` with nothing of ours on the path."""
    code = (
        "import sys; from hatchling import build; "
        f"print(build.build_{what}(sys.argv[1]), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", code, str(out)],
        cwd=folder,
        env={"PATH": os.environ["PATH"], "HOME": str(out), **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return out / done.stderr.split()[-1]


@pytest.mark.fast_cases("ds_ops_cpu")
@pytest.mark.parametrize("name", COMPILED)
def test_an_sdist_builds_a_wheel_outside_of_a_clone(name: str, tmp_path: Path) -> None:
    with tarfile.open(build_package("sdist", COMPILED[name], tmp_path)) as archive:
        archive.extractall(tmp_path / "alone", filter="data")
    (folder,) = (tmp_path / "alone").iterdir()
    assert wheels.clone_of(folder) is None
    wheel = build_package("wheel", folder, tmp_path)
    assert wheel.name.endswith("py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert not [n for n in archive.namelist() if "wheels" in n or n.endswith(".so")]


@pytest.mark.slow
def test_a_wheel_carries_its_library(tmp_path: Path) -> None:
    wheel = build_package("wheel", COMPILED["ds_nvme"], tmp_path, DS_BUILD_OPS="1")
    assert "none-any" not in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        carried = [n for n in archive.namelist() if n.startswith("ds_nvme/prebuilt/")]
    assert {Path(n).suffix for n in carried} == {".json", ".so"}


def test_what_the_environment_may_ask_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DS_BUILD_OPS", raising=False)
    assert not wheels.is_wanted("wheel")
    monkeypatch.setenv("DS_BUILD_OPS", "1")
    assert wheels.is_wanted("wheel") and not wheels.is_wanted("sdist")
    monkeypatch.setenv("DS_BUILD_OPS", "yes")
    with pytest.raises(ValueError, match="DS_BUILD_OPS=yes: use 1"):
        wheels.is_wanted("wheel")
