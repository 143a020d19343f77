"""BERT-like pre-training: param groups, accumulation, a checkpoint with client state, dist through
deepspeed.comm.
"""

import argparse
import json
import os

import deepspeed
import torch
from deepspeed import comm as dist
from torch import nn


class Bert(nn.Module):
    def __init__(self, vocab=40, width=16):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        layer = nn.TransformerEncoderLayer(width, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.decoder = nn.Linear(width, vocab)
        self.loss = nn.CrossEntropyLoss(ignore_index=-1)

    def forward(self, tokens, labels):
        hidden = self.norm(self.encoder(self.embed(tokens)))
        return self.loss(self.decoder(hidden).flatten(0, 1), labels.flatten())


def groups_of(model):
    no_decay = ["bias", "norm"]
    named = list(model.named_parameters())
    return [
        {
            "params": [p for n, p in named if not any(k in n for k in no_decay)],
            "weight_decay": 0.01,
        },
        {"params": [p for n, p in named if any(k in n for k in no_decay)], "weight_decay": 0.0},
    ]


def batches(count, micro, rank, seed):
    made = torch.Generator().manual_seed(seed + rank)
    for _ in range(count):
        tokens = torch.randint(1, 40, (micro, 6), generator=made)
        masked = torch.rand(tokens.shape, generator=made) < 0.3
        yield torch.where(masked, 0, tokens), torch.where(masked, tokens, -1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--out")
    parser.add_argument("--work")
    deepspeed.add_config_arguments(parser)
    args = parser.parse_args()
    dist.init_distributed("gloo" if not torch.cuda.is_available() else "nccl")
    torch.manual_seed(1)
    model = Bert()
    engine, optimizer, _, schedule = deepspeed.initialize(
        args=args, model=model, model_parameters=groups_of(model)
    )
    rank = dist.get_rank()
    losses = []
    boundaries = []
    lrs = []

    def train(count, seed):
        for tokens, labels in batches(count, engine.train_micro_batch_size_per_gpu(), rank, seed):
            loss = engine(tokens, labels)
            engine.backward(loss)
            boundaries.append(engine.is_gradient_accumulation_boundary())
            engine.step()
            shown = loss.detach().clone().float()
            dist.all_reduce(shown)
            losses.append(shown.item() / dist.get_world_size())
            lrs.append(engine.get_lr()[0])

    train(4, seed=5)
    engine.save_checkpoint(args.work, tag="here", client_state={"epoch": 7})
    train(2, seed=9)
    path, client = engine.load_checkpoint(args.work, tag="here")
    assert path is not None and client["epoch"] == 7
    assert os.path.isdir(os.path.join(args.work, "here"))
    train(4, seed=9)
    dist.barrier()
    if rank == 0:
        with open(args.out, "w") as file:
            json.dump({"losses": losses, "boundaries": boundaries, "lrs": lrs}, file)


if __name__ == "__main__":
    main()
