"""The GPT of examples/gpt as a pipeline: its embedding is the first layer and, tied, the last.
Start it with

    dscore run --nproc 2 examples/pipeline/gpt.py

Its checkpoints fit any number of stages: started again with --stages 1 on one process, it goes on
from the last.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1] / "gpt"))

from ds_pipeline import LayerSpec, PipelineModule, TiedLayerSpec
from model import VOCABULARY, Block
from train import Text

import ds_core


class Embedding(nn.Embedding):
    """With small weights, which serve as the output projection too."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)


class Position(nn.Module):
    def __init__(self, context: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.02 * torch.randn(context, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight[: x.shape[1]]


def project(embedding: nn.Embedding, x: Tensor) -> Tensor:
    return nn.functional.linear(x, embedding.weight)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def layers(context: int, width: int, depth: int, heads: int) -> list[Any]:
    return [
        TiedLayerSpec("embedding", Embedding, VOCABULARY, width),
        LayerSpec(Position, context, width),
        *(LayerSpec(Block, width, heads) for _ in range(depth)),
        LayerSpec(nn.LayerNorm, width),
        TiedLayerSpec("embedding", Embedding, VOCABULARY, width, forward_fn=project),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps in all")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument(
        "--run", type=Path, default=Path("runs/pipeline-gpt"), help="folder of the checkpoint"
    )
    config = Path(__file__).with_name("ds_config.json")
    parser.add_argument("--deepspeed_config", type=Path, default=config, help="the config file")
    args = parser.parse_args()

    context = 64
    model = PipelineModule(
        layers(context, args.width, 4, 4),
        num_stages=args.stages,
        loss_fn=cross_entropy,
        seed_layers=True,
        partition_method="type:Block",
    )
    engine, *_ = ds_core.initialize(args=args, model=model, training_data=Text(context))
    path, _ = engine.load_checkpoint(args.run, missing_ok=True)
    if path is not None and engine.global_rank == 0:
        print(f"resumed from step {engine.global_steps}", flush=True)
    while engine.global_steps < args.steps:
        loss = engine.train_batch()
        if engine.global_rank == 0 and (
            engine.global_steps % 20 == 0 or engine.global_steps == args.steps
        ):
            print(f"step {engine.global_steps}: loss {loss.item():.3f}", flush=True)
    engine.save_checkpoint(args.run)
    engine.destroy()


if __name__ == "__main__":
    main()
