"""A GAN: two engines, each with an optimizer of its own."""

import argparse
import json

import deepspeed
import torch
from torch import nn


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--out")
    deepspeed.add_config_arguments(parser)
    args = parser.parse_args()
    deepspeed.init_distributed()
    torch.manual_seed(9)
    maker = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 6), nn.Tanh())
    judge = nn.Sequential(nn.Linear(6, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
    engine_d, optimizer_d, _, _ = deepspeed.initialize(
        args=args, model=judge, model_parameters=judge.parameters()
    )
    engine_g, optimizer_g, _, _ = deepspeed.initialize(
        args=args, model=maker, model_parameters=maker.parameters()
    )
    criterion = nn.BCEWithLogitsLoss()
    made = torch.Generator().manual_seed(50 + engine_d.global_rank)
    micro = engine_d.train_micro_batch_size_per_gpu()
    losses = []
    for _ in range(5):
        real = torch.randn(micro, 6, generator=made) + 1
        noise = torch.randn(micro, 4, generator=made)
        ones = torch.ones(micro, 1)
        zeros = torch.zeros(micro, 1)
        fake = engine_g(noise)
        loss_d = criterion(engine_d(real), ones) + criterion(engine_d(fake.detach()), zeros)
        engine_d.backward(loss_d)
        engine_d.step()
        judge.requires_grad_(False)
        loss_g = criterion(engine_d(fake), ones)
        engine_g.backward(loss_g)
        engine_g.step()
        judge.requires_grad_(True)
        losses += [loss_d.item(), loss_g.item()]
    if engine_d.global_rank == 0:
        with open(args.out, "w") as file:
            json.dump({"losses": losses}, file)


if __name__ == "__main__":
    main()
