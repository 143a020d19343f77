"""Trains on any number of ranks, goes on where it was, and ends in order when it is told to
stop."""

import argparse
import json
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import ds_core


class Net(nn.Module):
    """Learns a sum of waves; returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)
        )

    def forward(self, points: Tensor, values: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.layers(points), values)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--folder", help="instead of autosave.folder")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    points = torch.rand(5000, 2) * 6
    data = TensorDataset(points, points.sin().sum(1, keepdim=True))
    config = json.loads(Path(__file__).with_name("ds_config.json").read_text())
    if arguments.folder:
        config["autosave"]["folder"] = arguments.folder

    engine, *_ = ds_core.initialize(model=Net(), config=config, training_data=data)
    if engine.resume() and engine.global_rank == 0:
        print(f"going on from step {engine.global_steps} with {engine.world_size} ranks")
    while engine.global_steps < arguments.steps:
        loss = engine.train_batch()
        if engine.global_steps % 50 == 0 and engine.global_rank == 0:
            print(f"step {engine.global_steps}: loss {loss.item():.4f}, {engine.world_size} ranks")
    engine.destroy()


if __name__ == "__main__":
    main()
