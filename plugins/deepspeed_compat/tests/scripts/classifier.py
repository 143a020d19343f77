"""CIFAR-like classifier: the loader comes from `initialize`, arguments from
`add_config_arguments`."""

import argparse
import json

import deepspeed
import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3)
        self.conv2 = nn.Conv2d(4, 6, 3)
        self.pool = nn.MaxPool2d(2, 2)
        self.fc1 = nn.Linear(6 * 2 * 2, 16)
        self.fc2 = nn.Linear(16, 10)

    def forward(self, x):
        x = self.pool(F.relu(self.conv1(x)))
        x = self.pool(F.relu(self.conv2(x)))
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--out")
    parser.add_argument("--dtype", default="fp32", choices=["fp32", "fp16", "bf16"])
    parser = deepspeed.add_config_arguments(parser)
    args = parser.parse_args()
    deepspeed.init_distributed()
    torch.manual_seed(0)
    net = Net()
    images = torch.randn(48, 3, 14, 14)
    labels = (images.mean((1, 2, 3)) * 400).long() % 10
    data = torch.utils.data.TensorDataset(images, labels)
    params = [p for p in net.parameters() if p.requires_grad]
    engine, optimizer, loader, schedule = deepspeed.initialize(
        args=args, model=net, model_parameters=params, training_data=data
    )
    local_device = deepspeed.accelerator.get_accelerator().device_name(engine.local_rank)
    dtype = None
    if engine.bfloat16_enabled():
        dtype = torch.bfloat16
    elif engine.fp16_enabled():
        dtype = torch.float16
    losses = []
    # every sample, in an order of our own: both frameworks shuffle, each in its own way
    rank = engine.global_rank
    world = engine.dp_world_size
    micro = engine.train_micro_batch_size_per_gpu()
    for epoch in range(2):
        for start in range(0, 48 - micro * world + 1, micro * world):
            rows = slice(start + rank * micro, start + (rank + 1) * micro)
            x = images[rows].to(local_device)
            y = labels[rows].to(local_device)
            if dtype is not None:
                x = x.to(dtype)
            loss = F.cross_entropy(engine(x).float(), y)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    assert len(loader) == 48 // (micro * world), (len(loader), micro, world)
    if engine.global_rank == 0:
        with open(args.out, "w") as file:
            json.dump({"losses": losses, "lr": engine.get_lr(), "steps": engine.global_steps}, file)


if __name__ == "__main__":
    main()
