"""CPU time that starting costs: `import ds_core`, its declaration modules, the command, and the
first `initialize`.

Each figure is the median over fresh interpreters, as CPU seconds (user + system) beyond the same
interpreter doing only what torch itself needs: for `initialize`, building the model and the
optimizer and taking one step.

    python benchmarks/startup.py [--repeat 7] [--deepspeed PYTHON]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Mapping
from statistics import median

MODEL = """
import torch
from torch import nn
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
x = torch.randn(4, 8)
"""
BARE = (
    MODEL
    + """
import torch.distributed
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
model(x).square().mean().backward()
torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
optimizer.step()
optimizer.zero_grad()
"""
)
CONFIG = '{"train_batch_size": 4, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}'
TRAIN = """
engine, *_ = {package}.initialize(model=model, {more}config={config})
engine.backward(engine(x).square().mean())
engine.step()
"""
DECLARATIONS = """
import ds_core, ds_core.setup.builtin, ds_core.plugins.hookspecs
import ds_lr_schedules.plugin, ds_monitor_csv.plugin, ds_monitor_tensorboard.plugin
"""


def cpu_seconds(python: str, code: str, environment: Mapping[str, str]) -> float:
    """User plus system time of one interpreter that runs `code`."""
    before = os.times()
    subprocess.run(
        [python, "-c", code], check=True, env=dict(environment), capture_output=True, timeout=300
    )
    after = os.times()
    return (
        after.children_user + after.children_system - before.children_user - before.children_system
    )


def measure(
    rows: Mapping[str, tuple[str, str]], repeat: int, environment: Mapping[str, str]
) -> dict[str, float]:
    """Median CPU seconds per row, rows interleaved; the first round only warms the disk cache."""
    times: dict[str, list[float]] = {name: [] for name in rows}
    for round_ in range(repeat + 1):
        for name, (python, code) in rows.items():
            seconds = cpu_seconds(python, code, environment)
            if round_:
                times[name].append(seconds)
    return {name: median(t) for name, t in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument(
        "--deepspeed", metavar="PYTHON", help="an interpreter that has deepspeed installed"
    )
    arguments = parser.parse_args()
    python = sys.executable
    ours = MODEL + "import ds_core\n" + TRAIN.format(package="ds_core", more="", config=CONFIG)
    rows = {
        "bare python": (python, "pass"),
        "import ds_core": (python, "import ds_core"),
        "all declaration modules": (python, DECLARATIONS),
        "dscore --help": (
            python,
            "import sys; sys.argv = ['dscore', '--help']\nfrom ds_cli import main\nmain()",
        ),
        "torch, model, one step": (python, BARE),
        "the same through initialize": (python, ours),
    }
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    base = {"the same through initialize": "torch, model, one step"}
    if arguments.deepspeed:
        alone = {
            "RANK": "0",
            "WORLD_SIZE": "1",
            "LOCAL_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29578",
        }
        environment |= {**alone, "DS_ACCELERATOR": "cpu"}
        settings = CONFIG.replace('"lr": 1e-3', '"lr": 1e-3, "torch_adam": true')
        theirs = TRAIN.format(
            package="deepspeed", more="model_parameters=model.parameters(), ", config=settings
        )
        theirs = MODEL + "import deepspeed\ntrue = True\n" + theirs
        rows["the same through deepspeed"] = (arguments.deepspeed, theirs)
        base["the same through deepspeed"] = "torch, model, one step"
    times = measure(rows, arguments.repeat, environment)
    for name, seconds in times.items():
        beyond = seconds - times[base.get(name, "bare python")]
        print(
            f"{name:28s} {seconds * 1e3:8.0f} ms CPU   {beyond * 1e3:+8.0f} ms over "
            f"{base.get(name, 'bare python')}"
        )


if __name__ == "__main__":
    main()
