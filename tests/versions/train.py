"""What is run on each version: the quickstart's model and config in small, ZeRO 0 to 3, each
stopped and resumed.

`dscore run --nproc N train.py CONFIG OUT`; rank 0 leaves ``OUT/seen.json``.
"""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

import torch
from model import GPT
from torch import Tensor
from torch.utils.data import Dataset

import ds_core

CONTEXT = 16
WIDTH = 32
STEPS = 6
OUT = Path(sys.argv[2])


class Numbers(Dataset[Any]):
    """Bytes that follow a rule, not a generator: they are the same everywhere."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        place = torch.arange(index * 5, index * 5 + CONTEXT + 1)
        text = (place * place // 7 + 31 * place) % 256
        return text[:-1], text[1:]


def train(config: dict[str, Any], folder: Path, steps: int) -> list[float]:
    """The mean loss over all ranks of the steps from where `folder` is to `steps`; saves there."""
    torch.manual_seed(0)
    model = GPT(CONTEXT, WIDTH, layers=2)
    engine, _, loader, _ = ds_core.initialize(model=model, config=config, training_data=Numbers())
    engine.load_checkpoint(folder, missing_ok=True)
    batches = iter(ds_core.RepeatingLoader(loader))
    losses = []
    while engine.global_steps < steps:
        total = torch.zeros(())
        for _ in range(engine.gradient_accumulation_steps()):
            x, y = next(batches)
            loss = engine(x, y)
            engine.backward(loss)
            engine.step()
            total += loss.detach() / engine.gradient_accumulation_steps()
        ds_core.comm.all_reduce(total)
        losses.append(total.item() / engine.world_size)
    engine.save_checkpoint(folder)
    engine.destroy()
    return losses


def main() -> None:
    base = json.loads(Path(sys.argv[1]).read_text())
    base |= {
        "train_batch_size": 16,
        "csv_monitor": {"enabled": True, "output_path": str(OUT), "job_name": "csv"},
    }
    base["scheduler"] = {
        "type": "WarmupCosineLR",
        "params": {"total_num_steps": STEPS, "warmup_num_steps": 1},
    }
    del base["tensorboard"]
    losses = {}
    for stage in range(4):
        config = {**base, "zero_optimization": {"stage": stage}}
        half = train(config, OUT / f"stage{stage}", STEPS // 2)
        losses[stage] = half + train(config, OUT / f"stage{stage}", STEPS)
        assert len(losses[stage]) == STEPS, losses
    if ds_core.comm.rank() == 0:
        with (OUT / "csv" / "Train_Samples_train_loss.csv").open() as file:
            rows = list(csv.reader(file))[1:]
        seen = {
            "python": sys.version.split()[0],
            "torch": torch.__version__,
            "losses": losses,
            "csv": rows,
        }
        (OUT / "seen.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
