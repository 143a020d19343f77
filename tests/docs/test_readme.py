"""What the README shows is real: its loop trains before and after the change, its commands print what
stands below them, its plugin works without being installed.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from pages import ROOT, Block, blocks

sys.path.insert(0, str(Path(__file__).parent))

from test_generated import printed

README = ROOT / "README.md"

BEFORE = """
import torch
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

torch.manual_seed(0)
losses = []


def build_model():
    return torch.nn.Sequential(torch.nn.Linear(10, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))


def build_data():
    x = torch.randn(4096, 10)
    return torch.utils.data.TensorDataset(x, x.sin().sum(1, keepdim=True))


"""
AFTER = '    losses.append(loss.item())\nprint("mean", sum(losses[-8:]) / 8)\n'

STOPPED = """
def load(step, rank):
    import time

    import torch

    if rank == 1 and step == 3:
        time.sleep(20)
    return torch.randn(8, 10), torch.randn(8, 1)
"""
SLOW = """
import torch
from data import load
from torch.nn.functional import mse_loss

import ds_core

model = torch.nn.Sequential(torch.nn.Linear(10, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
config = {
    "train_micro_batch_size_per_gpu": 8,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 2},
    "comms_guard": {"patience": 10},
}
engine, *_ = ds_core.initialize(model=model, config=config)
for step in range(6):
    inputs, targets = load(step, engine.global_rank)
    loss = mse_loss(engine(inputs), targets)
    engine.backward(loss)
    engine.step()
"""


def shown(language: str, contains: str = "") -> Block:
    (found,) = (b for b in blocks(README) if b.language == language and contains in b.text)
    return found


def script(kept: str) -> str:
    """The loop of the README with its lines that begin with a space or with `kept`."""
    lines = [line for line in shown("diff").text.splitlines() if line[:1] in (" ", kept)]
    return BEFORE + "".join(f"{line[1:]}\n" for line in lines) + AFTER


def run(folder: Path, *command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        check=False,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def write(folder: Path, with_plugin: bool = False) -> None:
    """What the README shows, as files."""
    (folder / "train.py").write_text(script("+"))
    config = shown("json").text
    if with_plugin:
        (folder / "goal.py").write_text(shown("python").text)
        added = re.search(r'"goal": .*?\]\}', README.read_text("utf-8"))
        assert added is not None
        config = config.replace("{", "{" + added[0] + ", ", 1)
    (folder / "ds_config.json").write_text(config)


def mean(said: str) -> float:
    found = re.search(r"mean ([\d.]+)", said)
    assert found is not None, said
    return float(found[1])


def test_its_picture_is_current() -> None:
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        from _site.idea_picture import TARGET, draw
    finally:
        sys.path.remove(str(ROOT / "docs"))
    assert TARGET.read_text("utf-8") == draw(), "run python docs/_site/idea_picture.py"


def test_it_is_short() -> None:
    assert len(README.read_text("utf-8").splitlines()) <= 130


def test_the_loop_trains_before_and_after(tmp_path: Path) -> None:
    lines = shown("diff").text.splitlines()
    added = [line for line in lines if line.startswith("+") and "import" not in line]
    assert len(added) == 4, added
    write(tmp_path)
    (tmp_path / "plain.py").write_text(script("-"))
    plain, ours = mean(run(tmp_path, "plain.py")), mean(run(tmp_path, "train.py"))
    assert plain < 4 and abs(ours - plain) < 0.5 * plain, (plain, ours)


def test_its_error_is_the_one_that_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path)
    file = tmp_path / "ds_config.json"
    file.write_text(file.read_text().replace('"lr": 0.01', '"lrr": 0.001'))
    monkeypatch.chdir(tmp_path)
    command, _, said = shown("text", "config check").text.removeprefix("$ ").partition("\n")
    done = subprocess.run(
        [sys.executable, "-m", "ds_cli", *shlex.split(command)[1:]],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and said.strip() in done.stdout + done.stderr


def test_the_plan_has_the_lines_that_are_shown() -> None:
    command, *lines = shown("text", "dscore plan").text.removeprefix("$ ").splitlines()
    said = printed(command).splitlines()
    assert not [line for line in lines if line not in said], "\n".join(said)


def test_the_plugin_works_without_installing_it(tmp_path: Path) -> None:
    write(tmp_path, with_plugin=True)
    config = tmp_path / "ds_config.json"
    config.write_text(config.read_text().replace('"loss": 0.4', '"loss": 0.9'))
    assert re.search(
        r"^step \d+ reached a loss of 0\.\d\d\d$", run(tmp_path, "train.py"), re.MULTILINE
    )


def masked(text: str) -> str:
    """`text` without numbers and names of hosts, and with one space between words."""
    return " ".join(re.sub(r"host [\w.-]+|\d+(\.\d+)?(e-?\d+)?", "#", text).split())


@pytest.mark.slow
def test_the_hang_is_told_as_shown(tmp_path: Path) -> None:
    (tmp_path / "data.py").write_text(STOPPED)
    (tmp_path / "train.py").write_text(SLOW)
    _, _, lines = shown("text", "waited").text.partition("\n")
    said = masked(run(tmp_path, "-m", "ds_cli", "run", "--nproc", "2", "train.py"))
    assert masked(lines) in said


@pytest.mark.slow
def test_the_loop_is_verified_as_shown(tmp_path: Path) -> None:
    write(tmp_path)
    command, _, line = shown("text", "dscore verify").text.removeprefix("$ ").partition("\n")
    said = run(tmp_path, "-m", "ds_cli", *shlex.split(command)[1:])
    assert said.startswith("equal: ") and line.startswith("equal: ")
    assert said.partition(",")[0] == line.partition(",")[0]


@pytest.mark.slow
def test_the_plugin_prints_what_is_shown(tmp_path: Path) -> None:
    write(tmp_path, with_plugin=True)
    _, _, line = shown("text", "reached a loss").text.partition("\n")
    said = run(tmp_path, "-m", "ds_cli", "run", "--nproc", "2", "train.py")
    assert masked(line) in masked(said)
