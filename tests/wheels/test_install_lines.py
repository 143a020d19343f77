"""Each distinct install line, run in an empty environment beside wheels that `make wheels` made.

The foundations (torch, pydantic, ...) are shown to it as this environment has them; what an extra
brings beyond them comes from an index, in the tests marked so.
"""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from importlib import metadata
from pathlib import Path

import pytest
from distributions import ROOT
from ds_testing.processes import clean_environment, run
from install_lines import PROJECTS, base_name, every_line
from packaging.requirements import Requirement

sys.path.insert(0, str(ROOT / ".ci"))

import build as builder

LINES = sorted({tuple(sorted(line.ours)) for line in every_line() if line.ours})
LOOK = """
import importlib, json, sys
from importlib import metadata
print(json.dumps({d.name: d.version for d in metadata.distributions() if d.name.startswith("dscore-")}))
for dist in metadata.distributions():
    if dist.name.startswith("dscore-"):
        (name,) = {f.parts[0] for f in dist.files if f.name == "__init__.py" and len(f.parts) == 2}
        importlib.import_module(name)
"""


def needs(words: tuple[str, ...]) -> tuple[set[str], set[str]]:
    """(ours, others): what a line brings by the pyproject files."""
    todo, ours, others, seen = list(words), set(), set(), set()
    while todo:
        need = Requirement(todo.pop())
        if str(need) in seen or (need.marker and not need.marker.evaluate()):
            continue
        seen.add(str(need))
        if need.name not in PROJECTS:
            others.add(need.name)
            continue
        ours.add(need.name)
        project = PROJECTS[need.name]
        todo += project.get("dependencies", [])
        for extra in need.extras:
            todo += project["optional-dependencies"][extra]
    return ours, others


def is_here(name: str) -> bool:
    try:
        metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return False
    return True


OFFLINE = [line for line in LINES if all(map(is_here, needs(line)[1]))]
ONLINE = [line for line in LINES if line not in OFFLINE]


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which `make wheels` has run."""
    folder = tmp_path_factory.mktemp("clone")
    assert builder.main([str(folder / "dist")]) == 0
    return folder


@pytest.fixture(scope="module")
def foundations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Links to all packages of this environment but ours."""
    found = tmp_path_factory.mktemp("foundations")
    for dist in metadata.distributions():
        tops = {Path(f).parts[0] for f in dist.files or ()} - {"..", "__pycache__"}
        if not dist.name.startswith("dscore-") and dist.name != "pip":
            for top in tops:
                if not (found / top).exists():
                    (found / top).symlink_to(Path(str(dist.locate_file(top))))
    return found


@pytest.fixture
def environment(foundations: Path, tmp_path: Path) -> Path:
    """The folder of an environment that has none of ours."""
    venv.create(tmp_path / "env", with_pip=False)
    (site,) = (tmp_path / "env" / "lib").glob("python3*/site-packages")
    (site / "found.pth").write_text(f"{foundations}\n")
    return tmp_path


def installed(
    words: tuple[str, ...], clone: Path, environment: Path, *options: str
) -> dict[str, str]:
    """Run the line; gives the versions of ours that are there, after importing each."""
    python = str(environment / "env" / "bin" / "python")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-compile"]
    run([*pip, *options, "-c", "dist/constraints.txt", *words], cwd=clone, timeout=300)
    said = run([python, "-c", LOOK], cwd=environment, env=clean_environment(HOME=str(environment)))
    found: dict[str, str] = json.loads(said.splitlines()[0])
    return found


def check(words: tuple[str, ...], clone: Path, found: dict[str, str]) -> None:
    pins = (clone / "dist" / "constraints.txt").read_text().splitlines()
    assert all(f"{name}=={number}" in pins for name, number in found.items())
    assert set(found) == needs(words)[0]


def test_the_lines_are_those_of_the_documents() -> None:
    """Most run offline; those that do not name services, or a front-end."""
    assert {base_name(word) for line in LINES for word in line} == set(PROJECTS)
    assert len(OFFLINE) > 50 and len(ONLINE) < 12, ONLINE


@pytest.mark.slow
@pytest.mark.parametrize("words", OFFLINE, ids=" ".join)
def test_a_line_installs_what_it_says(
    words: tuple[str, ...], clone: Path, environment: Path
) -> None:
    check(words, clone, installed(words, clone, environment, "--no-index"))


@pytest.mark.integration
@pytest.mark.parametrize("words", ONLINE, ids=" ".join)
def test_a_line_with_what_an_index_brings(
    words: tuple[str, ...], clone: Path, environment: Path
) -> None:
    check(words, clone, installed(words, clone, environment))


@pytest.mark.slow
def test_a_newer_release_on_an_index_is_not_taken(
    clone: Path, environment: Path, tmp_path: Path
) -> None:
    """Somebody else's dscore-zero 0.1.5, which satisfies every bound that we have."""
    index = tmp_path / "index"
    place = index / "dscore-zero"
    place.mkdir(parents=True)
    strange = builder.build([ROOT / "plugins" / "zero"], place, "0.1.5")[0]
    (place / "index.html").write_text(f'<a href="{strange.name}">{strange.name}</a>')
    found = installed(("dscore-zero",), clone, environment, "--index-url", index.as_uri())
    assert found["dscore-zero"].startswith(f"{builder.version(ROOT)}+g")

    plain = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "-q",
        "--no-deps",
        "--index-url",
        index.as_uri(),
    ]
    plain += ["--find-links", str(clone / "dist"), "-d", str(tmp_path / "got"), "dscore-zero"]
    subprocess.run(plain, check=True)
    assert [file.name for file in (tmp_path / "got").iterdir()] == [strange.name]
