"""What the wheels' test runs on two processes, far away from any source tree."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import nn

import ds_core

OUT = Path(sys.argv[1])
CONFIG = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.05}},
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_max_lr": 0.05, "warmup_num_steps": 4, "warmup_type": "linear"},
    },
    "gradient_clipping": 1.0,
    "csv_monitor": {"enabled": True, "output_path": str(OUT / "csv"), "job_name": "wheels"},
}


def main() -> None:
    """Learn a sum; leave what was seen in ``rank<n>.json``."""
    torch.manual_seed(0)
    x = torch.randn(64, 8)
    data = [(row, row.sum().reshape(1)) for row in x]
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    engine, _, loader, _ = ds_core.initialize(model=model, config=CONFIG, training_data=data)
    assert loader is not None
    losses = []
    for _ in range(6):
        for rows, targets in loader:
            loss = nn.functional.mse_loss(engine(rows), targets)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    seen = {
        "files": {
            name: module.__file__
            for name, module in sys.modules.items()
            if name.startswith("ds_") and "." not in name
        },
        "path": sys.path,
        "losses": losses,
        "lr": engine.get_lr(),
        "steps": engine.global_steps,
        "world_size": engine.world_size,
        "weights": [p.tolist() for p in model.parameters()],
    }
    (OUT / f"rank{engine.global_rank}.json").write_text(json.dumps(seen))
    engine.destroy()


if __name__ == "__main__":
    main()
