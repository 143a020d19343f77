"""What the README shows runs as it stands, in an empty folder."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"


def blocks():
    return re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)


def run(code, folder):
    (folder / "script.py").write_text(code)
    return subprocess.run(
        [sys.executable, "script.py"],
        check=False,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_the_use_is_short_and_learns(tmp_path):
    use, _ = blocks()
    assert len(use.splitlines()) <= 25
    done = run(use, tmp_path)
    assert done.returncode == 0, done.stderr
    found = re.search(r"loss ([\d.]+) after (\d+) steps", done.stdout)
    assert int(found[2]) == 40
    assert float(found[1]) < 8
    assert (tmp_path / "runs/first/Train_Samples_train_loss.csv").exists()
    assert (tmp_path / "runs/first/latest").read_text().splitlines()[0] == "global_step40"


def test_the_plugin_is_short_and_works_without_installing_it(tmp_path):
    use, plugin = blocks()
    assert len(plugin.splitlines()) <= 25
    (tmp_path / "early_stop.py").write_text(plugin)
    wired = use.replace(
        '"train_batch_size": 64,',
        '"train_batch_size": 64, "early_stop": {"loss": 1e9}, "plugins": {"load": '
        '["early_stop=early_stop"]},',
    )
    done = run(wired, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "step 0 reached a loss" in done.stderr


def test_its_error_is_the_one_that_is_given(tmp_path):
    from ds_core.errors import ConfigError
    from ds_core.setup.compose import compose

    shown = re.search(r"optimizer\.params\.lrr: .*", README.read_text())[0]
    try:
        compose({"train_batch_size": 1, "optimizer": {"type": "AdamW", "params": {"lrr": 0.001}}})
    except ConfigError as error:
        assert shown in str(error)
    else:
        raise AssertionError("the misspelt key was accepted")
