"""A GPT learns English, byte by byte, from the help texts inside every CPython. Start it with

    dscore run --nproc 2 examples/gpt/train.py

It keeps a checkpoint in runs/gpt and, started again, resumes from it.

    dscore run --nproc 2 examples/gpt/train.py --deepspeed_config
    examples/gpt/ds_config_zero3_offload.json

does the same with ZeRO stage 3, weights and optimizer states in the host's memory; either resumes
from the other's checkpoint.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from pydoc_data.topics import topics

import torch
from ds_command_kit.progress import progress
from model import GPT
from torch import Tensor
from torch.utils.data import Dataset

import ds_core


class Text(Dataset):
    """Overlapping windows of the text: (bytes, the same bytes shifted by one)."""

    def __init__(self, context: int) -> None:
        self.text = torch.frombuffer(
            bytearray("\n".join(topics.values()), "utf-8"), dtype=torch.uint8
        ).long()
        self.context = context

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.context * 4 - 4

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.context // 4
        piece = self.text[start : start + self.context + 1]
        return piece[:-1], piece[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=500, help="optimizer steps in all")
    parser.add_argument("--stop-after", type=int, help="save and stop after this many steps")
    parser.add_argument(
        "--run", type=Path, default=Path("runs/gpt"), help="folder of the checkpoint"
    )
    config = Path(__file__).with_name("ds_config.json")
    parser.add_argument("--deepspeed_config", type=Path, default=config, help="the config file")
    args = parser.parse_args()

    torch.manual_seed(0)
    model = GPT()
    engine, _, loader, _ = ds_core.initialize(
        args=args, model=model, training_data=Text(model.context)
    )
    path, _ = engine.load_checkpoint(args.run, missing_ok=True)
    if path is not None and engine.global_rank == 0:
        print(f"resumed from step {engine.global_steps}", flush=True)

    last = min(args.steps, args.stop_after or args.steps)
    if engine.global_steps >= last:
        raise SystemExit(
            f"{args.run} has {engine.global_steps} steps already; give more --steps or another "
            "--run"
        )
    batches = iter(ds_core.RepeatingLoader(loader))
    with progress(engine, args.steps) as bar:
        while engine.global_steps < last:
            for _ in range(engine.gradient_accumulation_steps()):
                x, y = next(batches)
                loss = engine(x.to(engine.device), y.to(engine.device))
                engine.backward(loss)
                engine.step()
            bar.update(loss)

    engine.save_checkpoint(args.run)
    engine.destroy()
    if engine.global_rank == 0:
        if last == args.steps:
            print(
                f"\n--- what it writes after {last} steps "
                f"---\n{model.eval().write(b'The ', 300)}\n---"
            )
        print(f"loss {loss.item():.3f} after {last} steps", flush=True)


if __name__ == "__main__":
    main()
