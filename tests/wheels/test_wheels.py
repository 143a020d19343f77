"""Every distribution as a wheel, in an empty virtual environment, with what it declares and nothing
else.

The foundations (torch, pydantic, ...) are too big to install again: a ``.pth`` file shows a new
environment a folder of links to those that are declared, as this environment has them, and to
nothing of ours. ``make test-wheels`` runs all of this; the tests of single distributions are slow.
"""

from __future__ import annotations

import email
import json
import os
import re
import shutil
import sys
import venv
import zipfile
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata
from pathlib import Path

import pytest
from building import build_wheels, pip
from distributions import DISTRIBUTIONS, ROOT
from ds_kernel_kit.build import cache_folder
from ds_testing.processes import clean_environment, run
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

HERE = Path(__file__).parent
NAME = re.compile(r'^name = "(.*)"', re.MULTILINE)
FOLDERS = {
    NAME.findall((folder / "pyproject.toml").read_text())[0]: folder
    for folder in (ROOT, *DISTRIBUTIONS)
}
RUN_BY = ("ds_command_kit", "ds_testing", "typer", "rich", "pytest")
"""Kits that call a plugin's code by themselves, and what they bring: modules that need them run
only where they are.
"""
TESTED_WITH = (
    "dscore-testing",
    "dscore-testing-hosts",
    "dscore-cli",
    "pytest",
    "pytest-timeout",
    "numpy",
    "hypothesis",
    "safetensors",
)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Distribution -> its wheel; of a release, where DSCORE_WHEELS names its folder."""
    if given := os.environ.get("DSCORE_WHEELS"):
        built = sorted(Path(given).glob("*-none-any.whl"))
    else:
        built = build_wheels([ROOT, *DISTRIBUTIONS], tmp_path_factory.mktemp("dist"))
    return {canonicalize_name(wheel.name.split("-")[0]): wheel for wheel in built}


def requirements(wheel: Path, extras: Iterable[str] = ()) -> list[Requirement]:
    """What a wheel declares."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        rows = email.message_from_bytes(archive.read(name)).get_all("Requires-Dist", [])
    found = map(Requirement, rows)
    return [
        r
        for r in found
        if r.marker is None or any(r.marker.evaluate({"extra": e}) for e in ("", *extras))
    ]


def optional(wheel: Path) -> set[str]:
    """Packages that only its extras bring."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        extras = email.message_from_bytes(archive.read(name)).get_all("Provides-Extra", [])
    always = {r.name for r in requirements(wheel)}
    return {r.name.replace("-", "_") for r in requirements(wheel, extras) if r.name not in always}


def closure(names: Iterable[str], wheels: dict[str, Path]) -> tuple[list[str], list[str]]:
    """(ours, others): what `names` need, themselves included."""
    ours: list[str] = []
    others: list[str] = []
    todo = [Requirement(n) for n in names]
    while todo:
        need = todo.pop()
        name = canonicalize_name(need.name)
        if name in wheels:
            todo += requirements(wheels[name], need.extras) if name not in ours else []
            ours += [name] if name not in ours else []
        elif name not in others:
            others.append(name)
            try:
                needs = metadata.requires(name) or ()
            except metadata.PackageNotFoundError:  # an extra's, or for another platform
                continue
            for text in needs:
                inner = Requirement(text)
                if inner.marker is None or any(
                    inner.marker.evaluate({"extra": e}) for e in ("", *need.extras)
                ):
                    todo.append(inner)
    return ours, others


def site_packages(prefix: Path) -> Path:
    return prefix / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"


Environment = Callable[..., Path]


@pytest.fixture(scope="module")
def environment(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """``environment(*names)``: the python of an environment with these distributions and what they
    declare.

    resolve: let pip find our own wheels, as users do with ``--find-links``.
    """

    def make(*names: str, resolve: bool = False) -> Path:
        place = tmp_path_factory.mktemp("environment")
        venv.create(place / "venv", with_pip=False)
        foundations = place / "foundations"
        foundations.mkdir()
        ours, others = closure(names, wheels)
        home = site_packages(Path(sys.prefix))
        for name in others:
            try:
                files = metadata.distribution(name).files or ()
            except metadata.PackageNotFoundError:  # for another platform
                continue
            for top in {Path(f).parts[0] for f in files} - {"..", "__pycache__"}:
                if (home / top).exists() and not (foundations / top).exists():
                    (foundations / top).symlink_to(home / top)
        (site_packages(place / "venv") / "foundations.pth").write_text(f"{foundations}\n")
        python = place / "venv" / "bin" / "python"
        if resolve:
            pip(
                "install",
                "--no-compile",
                "-q",
                "--find-links",
                str(wheels["dscore-train"].parent),
                *names,
                python=python,
            )
        else:
            pip(
                "install",
                "--no-deps",
                "--no-compile",
                "-q",
                *(str(wheels[n]) for n in ours),
                python=python,
            )
        return python

    return make


def packages(folder: Path) -> Iterator[Path]:
    yield from (p for p in folder.glob("ds_*") if (p / "__init__.py").exists())


def variables(home: Path) -> dict[str, str]:
    """The environment's variables; kernels that are built already serve."""
    found: dict[str, str] = clean_environment(
        HOME=str(home), DS_CORE_CACHE=str(cache_folder().parent)
    )
    return found


def test_a_wheel_of_every_distribution_with_all_its_files(
    wheels: dict[str, Path], tmp_path: Path
) -> None:
    assert sorted(wheels) == sorted(FOLDERS)
    for wheel in wheels.values():
        shutil.unpack_archive(wheel, tmp_path, "zip")
    for package in (p for folder in FOLDERS.values() for p in packages(folder)):
        files = [f.relative_to(package.parent) for f in package.rglob("*") if f.is_file()]
        assert [
            str(f) for f in files if "__pycache__" not in f.parts and not (tmp_path / f).exists()
        ] == []
        assert (tmp_path / package.name / "py.typed").exists()


def test_the_extras_bring_what_they_say(wheels: dict[str, Path]) -> None:
    """tests/architecture/test_extras.py has what each names; here, what a wheel's extra brings."""

    def brought(extra: str) -> set[str]:
        ours, others = closure([f"dscore-train[{extra}]"], wheels)
        return {*ours, *others}

    assert set(closure(["dscore-train"], wheels)[0]) == {"dscore-train"}
    assert brought("standard") < brought("all")
    assert not brought("all") & {"pytest", "ray", "dscore-deepspeed-compat", "dscore-testing"}
    assert {"uvicorn", "starlette"} <= brought("serve")
    assert {"accelerate", "transformers", "dscore-deepspeed-compat"} <= brought("hf")


@pytest.mark.slow
def test_the_core_alone_trains_on_one_and_two_ranks(
    environment: Environment, tmp_path: Path
) -> None:
    python = environment("dscore-train")
    script = tmp_path / "core_only.py"
    shutil.copy(HERE / "core_only.py", script)
    env = variables(tmp_path)
    for launcher in ([], ["-m", "torch.distributed.run", "--nproc_per_node", "2"]):
        out = tmp_path / f"out{len(launcher)}"
        out.mkdir()
        run([str(python), *launcher, str(script), str(out)], cwd=tmp_path, env=env, timeout=300)
        seen = [json.loads(f.read_text()) for f in sorted(out.iterdir())]
        assert len(seen) == (2 if launcher else 1)
        for s in seen:
            assert s["losses"][-1] < 0.5 * s["losses"][0]
            assert "dscore-checkpoint" in s["no_checkpoints"]
            assert s["weights"] == seen[0]["weights"]
        if not launcher:
            assert len(seen[0]["modules"]) <= 45, seen[0]["modules"]


@pytest.mark.slow
def test_the_standard_packages_from_a_folder_of_wheels(
    environment: Environment, tmp_path: Path
) -> None:
    python = environment("dscore-train[standard]", resolve=True)
    assert "No broken requirements" in pip("check", python=python)
    empty = tmp_path / "empty"
    out = tmp_path / "out"
    empty.mkdir()
    out.mkdir()
    script = tmp_path / "scripts" / "train.py"
    script.parent.mkdir()
    shutil.copy(HERE / "train.py", script)
    command = [str(python.with_name("dscore")), "run", "--nproc", "2", str(script), str(out)]
    run(command, cwd=empty, env=variables(empty), timeout=300)

    seen = [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(2)]
    home = str(python.parents[1]) + "/"
    assert [f for s in seen for f in s["files"].values() if not f.startswith(home)] == []
    assert [
        p for s in seen for p in s["path"] if p.startswith(str(ROOT)) and "site-packages" not in p
    ] == []
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


IMPORT_ALL = """
import importlib, json, sys
for name in json.loads(sys.argv[1]):
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name.partition(".")[0] not in json.loads(sys.argv[2]):
            raise
"""


def stand_alone(tests: Path, allowed: set[str]) -> list[Path]:
    """The test files for an environment that has the packages `allowed` of ours, and no other.

    These are the conformance tests of the plugin (``PluginConformance``) and files named
    ``test_*_alone.py``; where there are none, all files that import no other package of ours.
    """
    pattern = re.compile(r"^\s*(?:from|import) (ds_\w+)", re.MULTILINE)
    imports = {f: set(pattern.findall(f.read_text())) for f in tests.glob("test_*.py")}
    chosen = [
        f for f in imports if f.stem.endswith("_alone") or "PluginConformance" in f.read_text()
    ]
    for file in chosen:
        assert imports[file] <= allowed, (
            f"{file} imports {imports[file] - allowed}, which is not declared"
        )
    return sorted(chosen or [f for f in imports if imports[f] <= allowed])


@pytest.mark.slow
@pytest.mark.parametrize("dist", sorted(FOLDERS))
def test_each_distribution_alone(
    environment: Environment, wheels: dict[str, Path], dist: str, tmp_path: Path
) -> None:
    """Every module imports with what is declared; with pytest and the kits, the tests that stand
    alone pass.
    """
    folder = FOLDERS[dist]
    names = []
    for package in packages(folder):
        for file in package.rglob("*.py"):
            parts = file.relative_to(package.parent).with_suffix("").parts
            names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    env = variables(tmp_path)
    names = [n for n in names if not n.endswith("__main__")]
    absent = json.dumps([*RUN_BY, *sorted(optional(wheels[dist]))])
    run(
        [str(environment(dist)), "-c", IMPORT_ALL, json.dumps(names), absent], cwd=tmp_path, env=env
    )

    if dist == "dscore-train":  # its own tests are the tests of this repository
        return
    allowed = {
        package.name
        for name in closure([dist, *TESTED_WITH], wheels)[0]
        for package in packages(FOLDERS[name])
    }
    files = stand_alone(folder / "tests", allowed)
    assert files, f"{dist} has no test that needs only what it declares; see stand_alone"
    python = environment(dist, *TESTED_WITH)
    shutil.copytree(folder / "tests", tmp_path / "tests")
    shutil.copy(ROOT / "conftest.py", tmp_path)
    command = [
        str(python),
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        "not slow and not gpu",
    ]
    command += ["--import-mode=importlib", *(str(tmp_path / "tests" / f.name) for f in files)]
    run(command, cwd=tmp_path, env=env, timeout=300)
