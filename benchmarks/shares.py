"""How evenly model states lie over 4,096 ranks: our flat parts against dim-0 sharding, by
arithmetic.

FSDP2 (`torch.distributed.fsdp.fully_shard`) cuts each parameter along its first dimension with
`torch.chunk`: every rank but the last ones gets ``ceil(rows / ranks)`` rows, so a few more rows
than ranks means two rows for some ranks and none for the others. The rule is taken from torch
itself, on meta tensors.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Iterable

import torch

Shapes = list[tuple[int, ...]]


def llama(d: int, hidden: int, layers: int, words: int, kv: int | None = None) -> list[Shapes]:
    """Per module with parameters, their shapes; kv: width of keys and values, when not d."""
    kv = kv or d
    block: list[Shapes] = [[(d,)], [(d, d)], [(kv, d)], [(kv, d)], [(d, d)], [(d,)]]
    block += [[(hidden, d)], [(hidden, d)], [(d, hidden)]]
    return [[(words, d)], *(block * layers), [(d,)], [(words, d)]]


def gpt2(d: int, layers: int, words: int = 50257, positions: int = 1024) -> list[Shapes]:
    """GPT-2 in torch's layout of linear layers, its head tied to the embedding."""
    linear = [
        [(rows, columns), (rows,)] for rows, columns in ((3 * d, d), (d, d), (4 * d, d), (d, 4 * d))
    ]
    norm: list[Shapes] = [[(d,), (d,)]]
    block = [*norm, linear[0], linear[1], *norm, linear[2], linear[3]]
    return [[(words, d)], [(positions, d)], *(block * layers), *norm]


MODELS = {
    "GPT-2 (124M)": gpt2(768, 12),
    "GPT-2 XL (1.6B)": gpt2(1600, 48),
    "Llama 7B": llama(4096, 11008, 32, 32000),
    "Llama 3 8B": llama(4096, 14336, 32, 128256, 1024),
    "Llama 70B": llama(8192, 28672, 80, 32000, 1024),
}


def dim0(shapes: Iterable[tuple[int, ...]], world: int) -> list[int]:
    """Elements per rank when each tensor is cut by torch.chunk along its first dimension."""
    sizes = [0] * world
    for shape, count in Counter(shapes).items():
        for rank, chunk in enumerate(torch.chunk(torch.empty(shape, device="meta"), world)):
            sizes[rank] += count * chunk.numel()
    return sizes


def flat(modules: list[Shapes], world: int) -> list[int]:
    """Elements per rank, padding included, when each module's parameters are one flat bucket of
    stage 3.
    """
    from ds_zero.buckets.layout import Layout

    return [
        sum(Layout.of([math.prod(s) for s in shapes], world).shard_numel for shapes in modules)
    ] * world


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--world", type=int, default=4096)
    world = parser.parse_args().world
    print(f"Share of each of {world} ranks, over the ideal one (all parameters / ranks)\n")
    print(
        "| model | FSDP2: rank 0 | middle rank | last rank | ranks with nothing | dscore-zero: every "
        "rank |"
    )
    print("| --- | --- | --- | --- | --- | --- |")
    for name, modules in MODELS.items():
        shapes = [shape for module in modules for shape in module]
        ideal = sum(math.prod(s) for s in shapes) / world
        theirs = dim0(shapes, world)
        ours = flat(modules, world)
        cells = [f"{theirs[rank] / ideal:.2f}x" for rank in (0, world // 2, world - 1)]
        print(f"| {name} | {' | '.join(cells)} | {theirs.count(0)} | {max(ours) / ideal:.4f}x |")


if __name__ == "__main__":
    main()
