"""All distributions have one version, and require at least it of each other."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from distributions import DISTRIBUTIONS, ROOT

import ds_core

sys.path.insert(0, str(ROOT / ".ci"))

import version as one


def test_every_file_has_the_version_of_the_source() -> None:
    assert one.version(ROOT) == ds_core.__version__
    assert one.other(ROOT) == [], "run python .ci/version.py VERSION"
    for folder in DISTRIBUTIONS:
        assert one.OWN.search((folder / "pyproject.toml").read_text()), folder


@pytest.mark.parametrize(
    ("number", "bounds"),
    [
        ("0.1.3", ">=0.1.3,<0.2"),
        ("0.9.0", ">=0.9.0,<0.10"),
        ("1.0.0rc1", ">=1.0.0rc1,<2"),
        ("1.4.2", ">=1.4.2,<2"),
    ],
)
def test_the_bounds_follow_from_it(number: str, bounds: str) -> None:
    assert one.bounds(number) == bounds


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The files that have the version, elsewhere."""
    for file, _ in one.texts("0.0.0", ROOT):
        to = tmp_path / file.relative_to(ROOT)
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, to)
    return tmp_path


def test_a_new_version_is_written_everywhere(
    copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert one.main(["0.3.1", "--root", str(copy)]) == 0
    assert one.version(copy) == "0.3.1" and one.other(copy) == []
    zero = (copy / "plugins/zero/pyproject.toml").read_text()
    assert '\nversion = "0.3.1"\n' in zero and '"dscore-plan>=0.3.1,<0.4"' in zero
    core = (copy / "pyproject.toml").read_text()
    assert '"dscore-inference[serve]>=0.3.1,<0.4"' in core and '"torch>=2.6"' in core
    assert (
        "dscore-kernel-kit>=0.3.1,<0.4"
        in (copy / "ops/kernel_kit/ds_kernel_kit/wheels.py").read_text()
    )
    assert "\nversion: 0.3.1\n" in (copy / "CITATION.cff").read_text()
    assert "cff-version: 1.2.0\n" in (copy / "CITATION.cff").read_text()
    capsys.readouterr()

    (copy / "plugins/zero/pyproject.toml").write_text(zero.replace("plan>=0.3.1", "plan>=0.3.0"))
    assert one.main(["--root", str(copy)]) == 1
    assert "plugins/zero/pyproject.toml differs" in capsys.readouterr().out


def test_what_is_no_version_is_refused(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        one.main(["next", "--root", str(copy)])
    assert "next is no version such as 0.2.0" in capsys.readouterr().err
    assert one.other(copy) == []
