"""Makes the checkpoints beside it, with real DeepSpeed: ``generate.py FOLDER STAGE fp32|bf16`` on
each of two ranks.

They were written by DeepSpeed 0.19.8 with DS_ACCELERATOR=cpu (which has no fp16), after 3 of 5
steps; losses.json holds the mean loss of every step.
"""

import json
import os
import sys

import deepspeed
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(11, 6)
        self.mid = nn.Linear(6, 6)
        self.frozen = nn.Linear(6, 6, bias=False)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.emb.weight
        self.frozen.weight.requires_grad_(False)
        self.register_buffer("shift", torch.full((6,), 0.25))

    def forward(self, x):
        h = torch.tanh(self.mid(self.emb(x))) + self.shift.to(self.mid.weight.dtype)
        return nn.functional.cross_entropy(
            self.head(self.frozen(h)).float().flatten(0, 1), x.flatten()
        )


def groups(net):
    decay = [p for p in net.parameters() if p.dim() > 1 and p.requires_grad]
    rest = [p for p in net.parameters() if p.dim() <= 1 and p.requires_grad]
    return [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]


def config(stage, mode):
    found = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_num_steps": 10, "warmup_max_lr": 0.01},
        },
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 10},
        "steps_per_print": 10**9,
    }
    return found if mode == "fp32" else found | {mode: {"enabled": True}}


def batch(step, rank):
    return torch.randint(0, 11, (2, 5), generator=torch.Generator().manual_seed(100 * step + rank))


def main(folder, stage, mode):
    torch.manual_seed(0)
    net = Net()
    engine, *_ = deepspeed.initialize(
        model=net, model_parameters=groups(net), config=config(stage, mode)
    )
    rank = torch.distributed.get_rank()
    losses = []
    for step in range(5):
        if step == 3:
            engine.save_checkpoint(folder, tag="three", client_state={"note": "hello", "n": 3})
        loss = engine(batch(step, rank))
        engine.backward(loss)
        engine.step()
        total = loss.detach().double()
        torch.distributed.all_reduce(total)
        losses.append(total.item() / torch.distributed.get_world_size())
    if rank == 0:
        with open(f"{folder}/losses.json", "w") as file:
            json.dump(losses, file)
    torch.distributed.barrier()
    # one in ten ends of a process that used DeepSpeed is an abort ("terminate called ...")
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
