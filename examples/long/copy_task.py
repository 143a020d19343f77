"""A long-context toy: learn to copy across 16,384 tokens, with every sequence divided over two
ranks. Start it with

    dscore run --nproc 2 examples/long/copy_task.py

A sequence is a list of 8,192 different tokens in random order, and the same list again. What comes
next in the second half stands 8,191 tokens back, and nowhere else. The model has to find there what
follows the token that it sees: one layer of attention does that, once it compares each token with
the tokens *before* others. Training begins with short lists and ends with the longest, which no
rank could hold in the usual way: queries, keys and values are exchanged between the ranks
(`DistributedAttention`), the MLP and the logits with their loss are computed in tiles.
"""

from __future__ import annotations

import argparse
import time

import torch
from ds_sequence_parallel import DistributedAttention, TiledFusedLogitsLoss, TiledMLP, token_mean
from torch import Tensor, nn
from torch.nn import functional as F

import ds_core
from ds_core import comm


class Copier(nn.Module):
    """Attention and an MLP between an embedding and the same embedding as the output layer."""

    def __init__(self, words: int, width: int = 128, heads: int = 2, tiles: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.tiles = tiles
        self.words = nn.Embedding(words, width)
        self.query, self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )
        self.out = nn.Linear(width, width, bias=False)
        self.attention = DistributedAttention(attend)
        self.group = comm.ALONE

    def bind_sequence(self, group: object, zigzag: bool) -> None:
        """`initialize` tells modules with this method over which ranks sequences are divided."""
        self.group = group  # type: ignore[assignment]

    def forward(self, tokens: Tensor, before: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The loss, and which share of the labels is predicted. before: the token before each
        token.
        """
        here = self.words(tokens)
        past = self.words(before)
        query, key, value = (
            layer(x).unflatten(-1, (self.heads, -1))
            for layer, x in ((self.query, here), (self.key, past), (self.value, here))
        )
        x = self.out(self.attention(query, key, value).flatten(-2))
        x = x + TiledMLP.apply(lambda mlp, tile: mlp(tile), self.mlp, x, self.tiles)
        hits = torch.zeros(2)

        def loss_of_tile(head: nn.Embedding, x: Tensor, labels: Tensor) -> Tensor:
            logits = F.linear(x, head.weight).flatten(0, 1)
            wanted = labels.flatten()
            asked = wanted >= 0
            hits.add_(torch.stack([(logits.argmax(-1) == wanted)[asked].sum(), asked.sum()]))
            return F.cross_entropy(logits, wanted, ignore_index=-100, reduction="sum")

        total = TiledFusedLogitsLoss.apply(
            loss_of_tile, self.words, x, labels, None, self.tiles, None, "sum"
        )
        comm.all_reduce(hits, group=self.group)
        return token_mean(total, (labels >= 0).sum(), self.group), hits[0] / hits[1]


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention; [batch, sequence, heads, size] each."""
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def sequences(
    count: int, length: int, words: int, random: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, the token before each, and the next one where it can be known (else -100)."""
    half = length // 2
    once = torch.stack([torch.randperm(words, generator=random)[:half] for _ in range(count)])
    tokens = once.repeat(1, 2)
    before = tokens.roll(1, 1)
    labels = tokens.roll(-1, 1)
    labels[:, : half - 1] = labels[:, -1] = -100
    return tokens, before, labels


def plan(longest: int) -> list[tuple[int, int, int]]:
    """Sequences per step, their length, and the number of steps."""
    return [
        stage for stage in ((8, 128, 40), (1, 1024, 20), (1, 4096, 8)) if stage[1] < longest
    ] + [(1, longest, 4)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=16384, help="of the longest sequences")
    parser.add_argument("--sp", type=int, default=2, help="ranks that divide each sequence")
    args = parser.parse_args()

    torch.manual_seed(0)
    words = args.length // 2
    random = torch.Generator().manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "Adam", "params": {"lr": 3e-3}},
        "zero_optimization": {"stage": 1},
        "sequence_parallel": {"size": args.sp, "inputs": {"tokens": 1, "before": 1, "labels": 1}},
    }
    engine = ds_core.initialize(model=Copier(words), config=config)[0]
    began = time.perf_counter()
    for count, length, steps in plan(args.length):
        for _ in range(steps):
            loss, share = engine(*sequences(count, length, words, random))
            engine.backward(loss)
            engine.step()
        if engine.global_rank == 0:
            seconds = time.perf_counter() - began
            print(
                f"{length:6} tokens: loss {loss.item():.3f}, copied {share.item():.1%}, "
                f"{seconds:.0f} s",
                flush=True,
            )
    engine.eval()
    with torch.no_grad():
        _, share = engine(*sequences(1, args.length, words, random))
    if engine.global_rank == 0:
        print(
            f"copied across {args.length // 2} tokens: {share.item():.2%} of a sequence it has not "
            "seen",
            flush=True,
        )
    engine.destroy()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
