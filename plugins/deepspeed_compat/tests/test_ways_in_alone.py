"""The ways in: a module before the script, a call, a variable; and what frameworks look for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SHOW = (
    "import sys, deepspeed; print(deepspeed.__version__, __name__, sys.argv[1:], 'torch' in "
    "sys.modules)"
)


def python(*words: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k != "DS_CORE_AS_DEEPSPEED"} | variables
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, env=env, check=False
    )


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "beside.py").write_text("")
    path = tmp_path / "train.py"
    path.write_text(f"import beside\n{SHOW}\n")
    return path


def test_a_script_or_module_is_run_as_deepspeed(script: Path) -> None:
    for words in (
        ["-m", "ds_core.compat", script],
        ["-m", "ds_deepspeed_compat", script],
        [script],
    ):
        ended = python(*words, "--x", "1", DS_CORE_AS_DEEPSPEED="0" if words[0] == "-m" else "1")
        assert ended.stdout == "0.19.8+dscore __main__ ['--x', '1'] False\n", ended.stderr
    assert python("-m", "ds_core.compat", "-m", "json.tool", "--help").returncode == 0
    assert python(script).stdout == "0.19.8+dscore __main__ [] False\n", (
        "no DeepSpeed is installed here"
    )
    assert "usage:" in python("-m", "ds_core.compat").stderr


def test_install_in_a_script_and_too_late(tmp_path: Path) -> None:
    ended = python(
        "-c", f"import ds_core.compat; ds_core.compat.install(); ds_core.compat.install(); {SHOW}"
    )
    assert ended.stdout.startswith("0.19.8+dscore"), ended.stderr
    (tmp_path / "deepspeed.py").write_text("__version__ = 'real'\n")
    late = f"import deepspeed, ds_core.compat; ds_core.compat.install(); {SHOW}"
    assert "deepspeed is imported already" in python("-c", late, PYTHONPATH=str(tmp_path)).stderr
    first = f"import ds_core.compat; ds_core.compat.install(); {SHOW}"
    ended = python("-c", first, PYTHONPATH=str(tmp_path))
    assert ended.stdout.startswith("0.19.8+dscore")
    assert f"the DeepSpeed installed in {tmp_path} is not used" in ended.stderr


def test_a_deepspeed_that_is_installed_is_taken_unless_asked(script: Path, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "deepspeed.py").write_text("__version__ = 'real'\n")
    beside = {"PYTHONPATH": str(tmp_path / "real")}
    assert python(script, **beside).stdout.startswith("real ")
    asked = python(script, **beside, DS_CORE_AS_DEEPSPEED="1")
    assert asked.stdout.startswith("0.19.8+dscore ")
    assert "is not used" in asked.stderr


def test_frameworks_find_a_distribution() -> None:
    look = (
        "import importlib.metadata as m, importlib.util, importlib_metadata as b\n"
        "from packaging.version import parse\n"
        "assert importlib.util.find_spec('deepspeed') is not None\n"
        "assert m.version('deepspeed') == b.version('DeepSpeed') == '0.19.8+dscore'\n"
        "assert parse(m.version('deepspeed')) >= parse('0.16.4')\n"
        "assert m.metadata('deepspeed')['Name'] == 'deepspeed'\n"
        "assert [d.name for d in m.distributions(name='numpyy')] == []\n"
    )
    everywhere = "assert m.packages_distributions()['deepspeed'] == ['deepspeed']\n"
    for code, variables in ((look, {}), (look + everywhere, {"DS_CORE_AS_DEEPSPEED": "1"})):
        ended = python("-c", code, **variables)
        assert ended.returncode == 0, ended.stderr


def test_the_variables_of_the_launcher() -> None:
    show = (
        "import os; print(*(os.environ.get(n) for n in ('LOCAL_SIZE', 'CROSS_RANK', 'CROSS_SIZE')))"
    )
    given = {"LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "3"}
    assert python("-c", show, DS_CORE_AS_DEEPSPEED="1", **given).stdout.split() == ["2", "1", "3"]
    assert python("-c", show, **given).stdout.split() == ["None"] * 3
