"""Trains a small model until it is ended: ``endless.py [CONFIG [FOLDER]]``.

CONFIG: JSON, more keys of the config. Rank 0 says each step. With FOLDER each step is saved there.
"""

from __future__ import annotations

import itertools
import json
import sys
import time

import torch

import ds_core


def main(more: str = "{}", folder: str = "") -> None:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": 2},
        **json.loads(more),
    }
    engine, *_ = ds_core.initialize(model=torch.nn.Linear(64, 64), config=config)
    for step in itertools.count(1):
        engine.backward(engine(torch.ones(2, 64)).square().mean())
        engine.step()
        if folder:
            engine.save_checkpoint(folder, str(step))
        if engine.global_rank == 0:
            print(f"step {step}", flush=True)
        time.sleep(0.2)


if __name__ == "__main__":
    main(*sys.argv[1:])
