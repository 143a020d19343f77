"""What the wheels' test runs where nothing but the core is installed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import nn

import ds_core
from ds_core.errors import UsageError

CONFIG = {
    "train_batch_size": 16,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.02}},
    "bf16": {"enabled": True},
    "gradient_clipping": 1.0,
}


def modules_of_a_step() -> list[str]:
    """The core's modules that are loaded after one step in fp32 of a model without data.

    Packages are not counted: they hand names on.
    """
    config = {"train_micro_batch_size_per_gpu": 4, "optimizer": CONFIG["optimizer"]}
    engine, *_ = ds_core.initialize(model=nn.Linear(8, 1), config=config)
    engine.backward(engine(torch.ones(4, 8)).mean())
    engine.step()
    modules = sorted(
        name
        for name, module in sys.modules.items()
        if name.partition(".")[0] == "ds_core" and not hasattr(module, "__path__")
    )
    engine.destroy()
    return modules


def main() -> None:
    """Learn a sum; leave what was seen in ``rank<n>.json``."""
    modules = modules_of_a_step()
    torch.manual_seed(0)
    x = torch.randn(64, 8)
    data = [(row, row.sum().reshape(1)) for row in x]
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    engine, _, loader, _ = ds_core.initialize(model=model, config=CONFIG, training_data=data)
    assert loader is not None
    losses = []
    for _ in range(20):
        for rows, targets in loader:
            loss = nn.functional.mse_loss(engine(rows.bfloat16()).float(), targets)
            engine.backward(loss)
            engine.step()
        losses.append(loss.item())
    try:
        engine.save_checkpoint("nowhere")
    except UsageError as error:
        said = str(error)
    rank = engine.global_rank
    weights = [p.float().tolist() for p in model.parameters()]
    seen = {"losses": losses, "modules": modules, "no_checkpoints": said, "weights": weights}
    engine.destroy()
    Path(sys.argv[1], f"rank{rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
