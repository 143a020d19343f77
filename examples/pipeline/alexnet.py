"""AlexNet in pipeline stages learns handwritten digits (scikit-learn's, blown up to 64 x 64
pixels). Start it with

    dscore run --nproc 2 examples/pipeline/alexnet.py

`--stages 2` on four processes makes two pipelines, which share the data.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from ds_pipeline import PipelineModule
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import ds_core


def alexnet(classes: int, shrink: int) -> list[object]:
    """The layers, one after the other. shrink: divides the channels."""
    c1, c2, c3, c4, wide = (size // shrink for size in (64, 192, 384, 256, 4096))
    return [
        nn.Conv2d(1, c1, kernel_size=11, stride=4, padding=2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(kernel_size=3, stride=2),
        nn.Conv2d(c1, c2, kernel_size=5, padding=2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(kernel_size=3, stride=2),
        nn.Conv2d(c2, c3, kernel_size=3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(c3, c4, kernel_size=3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(c4, c4, kernel_size=3, padding=1),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d((6, 6)),
        flatten,
        nn.Dropout(),
        nn.Linear(c4 * 36, wide),
        nn.ReLU(inplace=True),
        nn.Dropout(),
        nn.Linear(wide, wide),
        nn.ReLU(inplace=True),
        nn.Linear(wide, classes),
    ]


def flatten(x: Tensor) -> Tensor:
    return x.flatten(1)


def digits(size: int) -> tuple[TensorDataset, TensorDataset]:
    """Images of (1, size, size) with labels, for training and for testing."""
    images, labels = load_digits(return_X_y=True)
    small = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16 - 0.3
    large = nn.functional.interpolate(small, size=(size, size), mode="bilinear")
    known = torch.tensor(labels)
    return TensorDataset(large[:1536], known[:1536]), TensorDataset(large[1536:], known[1536:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument(
        "--shrink",
        type=int,
        default=4,
        help="divide AlexNet's channels by this; 1: as in the paper",
    )
    config = Path(__file__).with_name("ds_config.json")
    parser.add_argument("--deepspeed_config", type=Path, default=config, help="the config file")
    args = parser.parse_args()

    torch.manual_seed(0)
    train, test = digits(64)
    layers = alexnet(10, args.shrink)
    model = PipelineModule(
        layers, num_stages=args.stages, loss_fn=nn.CrossEntropyLoss(), partition_method="parameters"
    )
    engine, *_ = ds_core.initialize(args=args, model=model, training_data=train)
    for step in range(1, args.steps + 1):
        loss = engine.train_batch()
        if engine.global_rank == 0 and (step % 10 == 0 or step == args.steps):
            print(f"step {step}: loss {loss.item():.3f}", flush=True)

    size = engine.train_micro_batch_size_per_gpu()
    rows = [test[i : i + size] for i in range(0, len(test) // size * size, size)]
    loss, outputs = engine.eval_batch(iter(rows), return_logits=True, num_micro_batches=len(rows))
    if engine.is_last_stage() and engine.mpu().get_data_parallel_rank() == 0:
        right = sum(
            (o.argmax(1) == y).sum().item() for o, (_, y) in zip(outputs, rows, strict=True)
        )
        print(
            f"test: loss {loss.item():.3f}, {100 * right / (size * len(rows)):.1f} % right",
            flush=True,
        )
    engine.destroy()


if __name__ == "__main__":
    main()
