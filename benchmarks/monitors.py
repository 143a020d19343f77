"""What monitors cost: a step of examples/gpt with all installed monitors and wall_clock_breakdown,
and without.

A rank's share of a step of the quickstart (two micro-batches of 16), in one process with one
thread. Engines take turns in blocks of steps. Medians over blocks; CPU time is that of the process
with all its threads.

    python benchmarks/monitors.py [--blocks 30] [--steps 10] [--only wandb ...]

Run it with ``.venv-monitors/bin/python`` after ``make test-monitors`` to have the services'
packages too.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
SECTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "csv_monitor": ("ds_monitor_csv", {"output_path": "files", "job_name": "csv"}),
    "tensorboard": ("tensorboard", {"output_path": "files", "job_name": "tensorboard"}),
    "wandb": ("wandb", {}),
    "comet": ("comet_ml", {"online": False}),
    "mlflow": ("mlflow", {"tracking_uri": "mlruns"}),
    "trackio": ("trackio", {}),
}
OFFLINE = {
    "WANDB_MODE": "offline",
    "WANDB_SILENT": "true",
    "COMET_OFFLINE_DIRECTORY": "comet",
    "TRACKIO_DIR": "trackio",
}


def start(sections: dict[str, Any]) -> Any:
    import ds_core

    sys.path.insert(0, str(ROOT / "examples" / "gpt"))
    from model import GPT

    torch.manual_seed(0)
    config = json.loads((ROOT / "examples" / "gpt" / "ds_config.json").read_text())
    config = {k: v for k, v in config.items() if k not in SECTIONS} | {"train_batch_size": 32}
    return ds_core.initialize(model=GPT(), config=config | sections)[0]


def block(engine: Any, steps: int) -> tuple[float, float]:
    """Seconds, and seconds of CPU, of one step."""
    batch = torch.randint(0, 127, (2, 16, engine.module.context))
    wall = time.perf_counter()
    cpu = time.process_time()
    for _ in range(steps):
        for _ in range(2):
            engine.backward(engine(batch[0], batch[1]))
            engine.step()
    return (time.perf_counter() - wall) / steps, (time.process_time() - cpu) / steps


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, default=30)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument(
        "--only", nargs="*", default=list(SECTIONS), choices=[*SECTIONS, "wall_clock_breakdown"]
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = {
        s: {"enabled": True, **SECTIONS[s][1]}
        for s in args.only
        if s in SECTIONS and importlib.util.find_spec(SECTIONS[s][0])
    }
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(OFFLINE)
        os.chdir(folder)
        without = start({})
        with_all = start({**found, "wall_clock_breakdown": True, "steps_per_print": 10**9})
        rows: dict[str, list[tuple[float, float]]] = {"none": [], "all": []}
        for number in range(args.blocks + 1):
            pairs = [("none", without), ("all", with_all)]
            for name, engine in pairs if number % 2 else pairs[::-1]:
                measured = block(engine, args.steps)
                if number:  # the first is not like the others
                    rows[name].append(measured)
        without.destroy()
        with_all.destroy()
        os.chdir(ROOT)
    print(
        f"with {', '.join(found)} and wall_clock_breakdown; {args.blocks} blocks of {args.steps} "
        "steps"
    )
    for index, what in enumerate(("wall", "CPU")):
        none, full = (median(row[index] for row in rows[name]) for name in ("none", "all"))
        ratio = median(b[index] / a[index] for a, b in zip(rows["none"], rows["all"], strict=True))
        print(
            f"{what:>5}: none {none * 1e3:.2f} ms, all {full * 1e3:.2f} ms per step; median of "
            f"ratios {ratio:.3f}"
        )


if __name__ == "__main__":
    main()
