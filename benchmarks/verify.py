"""What a step costs under `dscore verify`, in plain steps of the same script.

A small GPT trains on two ranks at ZeRO 2, plainly and under verification, with few and with more
steps. The difference in CPU time of all processes is what the steps cost: starts fall out, and a
busy machine changes little.

    python benchmarks/verify.py [--few 2] [--more 32] [--width 128] [--accumulation 2]
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

GPT = Path(__file__).parents[1] / "examples" / "gpt"

SCRIPT = """
import sys
sys.path.insert(0, {gpt!r})
import torch, ds_core
from model import GPT
torch.manual_seed(0)
config = {{
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": {accumulation},
    "gradient_clipping": 1.0,
    "optimizer": {{"type": "AdamW", "params": {{"lr": 1e-3}}}},
    "zero_optimization": {{"stage": 2}},
}}
model = GPT(width={width})
engine = ds_core.initialize(model=model, config=config)[0]
data = torch.Generator().manual_seed(engine.global_rank)
while engine.global_steps < int(sys.argv[1]):
    x = torch.randint(0, 256, (8, model.context + 1), generator=data)
    engine.backward(engine(x[:, :-1], x[:, 1:]))
    engine.step()
"""


def seconds(words: list[str], folder: str) -> float:
    """CPU time of a command and all that it starts."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "ds_cli", *words]
    subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--few", type=int, default=2)
    parser.add_argument("--more", type=int, default=32)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--accumulation", type=int, default=2)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "train.py"
        text = SCRIPT.format(gpt=str(GPT), width=args.width, accumulation=args.accumulation)
        script.write_text(text, encoding="utf-8")
        # The first run pays for what is then in the system's cache.
        seconds(["run", "--nproc", "2", str(script), str(args.few)], folder)
        plain = []
        verified = []
        for steps in (args.few, args.more):
            plain.append(seconds(["run", "--nproc", "2", str(script), str(steps)], folder))
            words = ["verify", "--steps", str(steps), str(script), str(steps + 1)]
            verified.append(seconds(words, folder))
    more = args.more - args.few
    one = (plain[1] - plain[0]) / more
    all_runs = (verified[1] - verified[0]) / more
    print(
        f"a plain step: {one:.2f} s of CPU; under verify: {all_runs:.2f} s; {all_runs / one:.1f}x"
    )


if __name__ == "__main__":
    main()
