"""What answers at once: help and version. No command loads torch before it must."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from cli_runs import ROOT, dscore
from ds_testing import processes


@pytest.mark.fast_cases("plugins", "run --help", "run no_such_script.py", "config check")
@pytest.mark.parametrize(
    "words",
    [
        *(
            ["--help"],
            ["--version"],
            ["plugins"],
            ["plugins", "zero_optimization"],
            ["run", "--help"],
            ["run", "no_such_script.py"],
        ),
        *(["config", "schema"], ["config", "explain", "fp16"], ["config", "check"]),
    ],
    ids=" ".join,
)
def test_no_torch_is_loaded(tmp_path: Path, words: list[str]) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"train_batch_size": 4, "csv_monitor": {"enabled": false}}')
    words = [*words, str(file)] if words[-1] == "check" else words
    code = """
import sys
class Forbid:
    def find_spec(self, name, path=None, target=None):
        if name in ("torch", "numpy"):
            raise AssertionError(f"{name} is imported")
sys.meta_path.insert(0, Forbid())
from ds_cli import main
main()
"""
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        env=processes.clean_environment(PYTHONPATH=str(ROOT)),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    if words[-1] == "no_such_script.py":
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == f"dscore: no such script: 'no_such_script.py' in {str(tmp_path)!r}\n"
    else:
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        assert done.stdout


def test_the_help_names_every_command_and_python_m_works() -> None:
    env = processes.clean_environment(PYTHONPATH=str(ROOT))
    output = processes.run([sys.executable, "-m", "ds_cli", "--help"], env=env)
    for name in ("run", "plugins", "doctor", "config"):
        assert f"\n  {name} " in output
    from ds_core import __version__

    assert dscore("--version").output == f"dscore-train {__version__}\n"
