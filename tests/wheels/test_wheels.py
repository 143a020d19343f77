"""Every distribution as a wheel, in an empty virtual environment, trains on two processes.

The foundations (torch, pydantic, ...) are too big to install again, so a ``.pth`` file shows the new environment a
folder of links to the ones this environment has, and to nothing of ours.
"""

from __future__ import annotations

import json
import shutil
import sys
import venv
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from ds_kernel_kit.build import cache_folder


@pytest.fixture(scope="module")
def wheels(building: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    built: list[Path] = building.build_wheels(building.DISTRIBUTIONS, tmp_path_factory.mktemp("wheels"))
    return built


@pytest.fixture(scope="module")
def place(building: ModuleType, tmp_path_factory: pytest.TempPathFactory, wheels: list[Path]) -> Path:
    """An environment with the wheels, and with links to the foundations."""
    place = tmp_path_factory.mktemp("environment")
    venv.create(place / "venv", with_pip=False)
    foundations = place / "foundations"
    foundations.mkdir()
    for entry in site_packages(Path(sys.prefix)).iterdir():
        ours = entry.name.startswith(("ds_", "acme_", "broken_", "_ds_", "__editable__"))
        if not ours and entry.suffix != ".pth" and entry.name != "__pycache__":
            (foundations / entry.name).symlink_to(entry)
    (site_packages(place / "venv") / "foundations.pth").write_text(f"{foundations}\n")
    building.pip("install", "--no-deps", "--no-compile", "-q", *map(str, wheels), python=place / "venv/bin/python")
    return place


def packages(building: ModuleType) -> Iterator[Path]:
    for dist in building.DISTRIBUTIONS:
        yield from (p for p in dist.glob("ds_*") if (p / "__init__.py").exists())


def site_packages(prefix: Path) -> Path:
    return prefix / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"


def test_a_wheel_of_every_distribution_with_all_its_files(
    building: ModuleType, wheels: list[Path], tmp_path: Path
) -> None:
    assert len(wheels) == len(building.DISTRIBUTIONS)
    for wheel in wheels:
        shutil.unpack_archive(wheel, tmp_path, "zip")
    for package in packages(building):
        files = [f.relative_to(package.parent) for f in package.rglob("*") if f.is_file()]
        assert [str(f) for f in files if "__pycache__" not in f.parts and not (tmp_path / f).exists()] == []
        assert (tmp_path / package.name / "py.typed").exists()


def test_what_the_wheels_need_is_declared_and_there(building: ModuleType, place: Path) -> None:
    assert "No broken requirements" in building.pip("check", python=place / "venv/bin/python")


def test_training_from_wheels_on_two_processes(building: ModuleType, place: Path, tmp_path: Path) -> None:
    empty, out = tmp_path / "empty", tmp_path / "out"
    empty.mkdir()
    out.mkdir()
    script = tmp_path / "scripts" / "train.py"
    script.parent.mkdir()
    shutil.copy(Path(__file__).with_name("train.py"), script)

    dscore = place / "venv" / "bin" / "dscore"
    environment = building.clean_environment(
        HOME=str(empty), DS_CORE_CACHE=str(cache_folder().parent)
    )  # kernels built already serve
    names = sorted(p.name for p in packages(building))
    command = [str(dscore), "run", "--nproc", "2", str(script), str(out), *names]
    building.run(command, cwd=empty, env=environment, timeout=300)

    seen = [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(2)]
    home = str(place / "venv") + "/"
    assert sorted(seen[0]["files"]) == names
    assert [f for s in seen for f in s["files"].values() if not f.startswith(home)] == []
    assert [p for s in seen for p in s["path"] if p.startswith(str(building.ROOT)) and "site-packages" not in p] == []
    assert seen[0]["weights"] == seen[1]["weights"]
    assert [s["world_size"] for s in seen] == [2, 2]
    assert [s["steps"] for s in seen] == [24, 24]  # 6 epochs of 64 rows in batches of 16
    assert seen[0]["lr"] == [0.05]
    for s in seen:
        assert sum(s["losses"][-8:]) < 0.5 * sum(s["losses"][:8])
    assert list(empty.iterdir()) == []

    rows = (out / "csv" / "wheels" / "Train_Samples_train_loss.csv").read_text().splitlines()
    assert len(rows) == 1 + 24
    assert rows[-1].split(",")[0] == str(24 * 16)
