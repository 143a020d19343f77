"""Engine overhead: CPU time per step of ds_core (and DeepSpeed, when installed) over a bare torch
loop.

One process, one thread; every contestant does the same: zero gradients, forward, backward, clip,
fused AdamW step. Contestants run interleaved in blocks, and the median block counts, so that a
noisy machine hits all alike. Each stage runs without ``steps_per_print`` (0), and with it as users
set it.

    python benchmarks/overhead.py [--layers 2 32] [--width 16] [--stages 0 1 2 3] [--prints 0 10
    1000]
                                  [--deepspeed PYTHON]

``--stages`` names the ZeRO stages to measure, ``--prints`` the values of ``steps_per_print``.
``--deepspeed PYTHON`` names an interpreter that has deepspeed; it is timed in processes of its own,
with its own bare loop beside it, because it patches torch.
"""

from __future__ import annotations

import argparse
import glob
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from statistics import median

import torch
from torch import nn

BATCH = 8
CLIP = 1.0
STEPS = 60
BLOCKS = 25

Step = Callable[[], None]


def build(layers: int, width: int) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))), torch.randn(
        BATCH, width
    )


def bare(layers: int, width: int) -> Step:
    model, x = build(layers, width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()

    return step


def config(stage: int, prints: int = 0) -> dict[str, object]:
    """prints: ``steps_per_print``; 0: the key is not there."""
    return {
        **({"steps_per_print": prints} if prints else {}),
        "zero_optimization": {"stage": stage},
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_clipping": CLIP,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }


def ours(layers: int, width: int, stage: int, prints: int) -> Step:
    import ds_core

    model, x = build(layers, width)
    engine, *_ = ds_core.initialize(model=model, config=config(stage, prints))
    logging.getLogger("ds_core").handlers.clear()  # lines are made as in a run, and shown to nobody

    def step() -> None:
        loss = engine(x).square().mean()
        engine.backward(loss)
        engine.step()

    return step


def theirs(layers: int, width: int, stage: int) -> Step:
    import deepspeed  # type: ignore[import-not-found]

    model, x = build(layers, width)
    settings = {
        **config(stage),
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True, "fused": True}},
    }
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=settings
    )

    def step() -> None:
        loss = engine(x).square().mean()
        engine.backward(loss)
        engine.step()

    return step


def measure(contestants: dict[str, Step]) -> dict[str, float]:
    """Median CPU microseconds per step of each contestant, blocks interleaved."""
    for step in contestants.values():
        for _ in range(STEPS):
            step()
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(BLOCKS):
        for name, step in contestants.items():
            start = time.process_time()
            for _ in range(STEPS):
                step()
            times[name].append((time.process_time() - start) / STEPS * 1e6)
    return {name: median(t) for name, t in times.items()}


def run_deepspeed(python: str, layers: int, width: int, stage: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as cache:
        alone = {
            "RANK": "0",
            "WORLD_SIZE": "1",
            "LOCAL_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29577",
        }
        quiet = {"DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": cache, "OMP_NUM_THREADS": "1"}
        environment = {**os.environ, **alone, **quiet}
        command = [python, __file__, "--child", str(layers), str(width), str(stage)]
        done = subprocess.run(
            command, check=False, env=environment, capture_output=True, text=True, timeout=600
        )
    # 66 MiB a rank, which it never unlinks
    for leftover in glob.glob("/dev/shm/deepspeed_allreduce_buffer_*"):
        os.unlink(leftover)
    if done.returncode:
        raise SystemExit(f"the deepspeed run failed:\n{done.stderr[-2000:]}")
    answer: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 32])
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--stages", type=int, nargs="+", default=[0], choices=range(4))
    parser.add_argument("--prints", type=int, nargs="+", default=[0, 10, 1000])
    parser.add_argument(
        "--deepspeed", metavar="PYTHON", help="an interpreter that has deepspeed installed"
    )
    parser.add_argument("--child", nargs=3, type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.child:
        layers, width, stage = arguments.child
        print(
            json.dumps(
                measure(
                    {"bare torch": bare(layers, width), "deepspeed": theirs(layers, width, stage)}
                )
            )
        )
        return
    print(
        f"torch {torch.__version__}, python {sys.version.split()[0]}, width {arguments.width}, "
        f"batch {BATCH}"
    )
    for layers in arguments.layers:
        own = {
            f"ds_core stage {stage}, prints {prints}": ours(layers, arguments.width, stage, prints)
            for stage in arguments.stages
            for prints in arguments.prints
        }
        times = measure({"bare torch": bare(layers, arguments.width), **own})
        rows = {name: (us, us / times["bare torch"]) for name, us in times.items()}
        for stage in arguments.stages if arguments.deepspeed else ():
            other = run_deepspeed(arguments.deepspeed, layers, arguments.width, stage)
            rows[f"deepspeed stage {stage}"] = (
                other["deepspeed"],
                other["deepspeed"] / other["bare torch"],
            )
        for name, (us, ratio) in rows.items():
            print(f"{layers:3d} layers  {name:28s} {us:8.1f} us/step  {ratio:5.2f}x bare torch")


if __name__ == "__main__":
    main()
