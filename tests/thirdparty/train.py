"""Three steps by the config named on the command line; prints what came out as one JSON line (no
test).
"""

from __future__ import annotations

import json
import sys

import torch
from torch import nn

import ds_core


def main() -> None:
    """Train a small regression."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    start = model.weight.detach().clone()
    bias = model.bias.item()
    engine, optimizer, _, scheduler = ds_core.initialize(model=model, config=sys.argv[1])
    x = torch.randn(8, 4)
    for _ in range(3):
        loss = nn.functional.mse_loss(engine(x), x.sum(1, keepdim=True))
        engine.backward(loss)
        engine.step()
    print(
        json.dumps(
            {
                "accelerator": ds_core.get_accelerator().name,
                "optimizer": type(optimizer).__name__,
                "lr": engine.get_lr(),
                "moved": float((model.weight.detach() - start).abs().max()),
                "bias": [model.bias.item(), bias],
                "scheduler": type(scheduler).__name__,
                "steps": engine.global_steps,
            }
        )
    )
    engine.destroy()


if __name__ == "__main__":
    main()
