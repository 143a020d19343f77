"""Lightning Fabric with DeepSpeedStrategy, or its DDP."""

from __future__ import annotations

import json
import os

import torch
from common import Tokens, arguments, cuda_on_cpu, tiny_llama, write
from lightning.fabric import Fabric
from lightning.fabric.accelerators import CUDAAccelerator
from lightning.fabric.strategies import DDPStrategy, DeepSpeedStrategy
from torch.utils.data import DataLoader


def main() -> None:
    """Eight steps, saved after four and loaded again."""
    args = arguments()
    strategy = DDPStrategy(process_group_backend="gloo")
    if args.deepspeed:
        with open(args.deepspeed) as file:
            strategy = DeepSpeedStrategy(config=json.load(file), process_group_backend="gloo")
    accelerator = cuda_on_cpu(CUDAAccelerator) if args.deepspeed else "cpu"
    fabric = Fabric(
        accelerator=accelerator, devices=int(os.environ["WORLD_SIZE"]), strategy=strategy
    )
    fabric.launch()
    module = tiny_llama()
    optimizer = torch.optim.AdamW(module.parameters(), lr=5e-3)
    model, optimizer = fabric.setup(module, optimizer)
    loader = fabric.setup_dataloaders(DataLoader(Tokens(64), batch_size=2, shuffle=False))
    losses = []
    for index, batch in enumerate(loader):
        if index == 8:
            break
        loss = model(**batch).loss
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(fabric.all_reduce(loss.detach(), reduce_op="mean")))
        if index == 3 and args.work:
            state = {"model": model, "optimizer": optimizer, "step": index}
            fabric.save(str(args.work / "fabric.ckpt"), state)
            fabric.load(str(args.work / "fabric.ckpt"), state)
    write(args.out, fabric.strategy.model if args.deepspeed else model, losses=losses)


if __name__ == "__main__":
    main()
