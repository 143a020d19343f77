"""A small AlexNet in two pipeline stages."""

import argparse
import json

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.utils import RepeatingLoader
from torch import nn


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--out")
    parser.add_argument("-p", "--pipeline-parallel-size", type=int, default=2)
    deepspeed.add_config_arguments(parser)
    args = parser.parse_args()
    deepspeed.init_distributed(dist_backend="gloo" if not torch.cuda.is_available() else "nccl")
    layers = [
        LayerSpec(nn.Conv2d, 3, 6, 3, padding=1),
        LayerSpec(nn.ReLU, inplace=True),
        LayerSpec(nn.MaxPool2d, 2),
        LayerSpec(nn.Conv2d, 6, 8, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        lambda x: torch.flatten(x, 1),
        LayerSpec(nn.Linear, 32, 16),
        nn.ReLU(),
        LayerSpec(nn.Linear, 16, 10),
    ]
    torch.manual_seed(3)
    net = PipelineModule(
        layers=layers,
        loss_fn=nn.CrossEntropyLoss(),
        num_stages=args.pipeline_parallel_size,
        partition_method="uniform",
        base_seed=42,
        seed_layers=True,
    )
    made = torch.Generator().manual_seed(8)
    images = torch.randn(32, 3, 8, 8, generator=made)
    labels = torch.randint(0, 10, (32,), generator=made)
    params = [p for p in net.parameters() if p.requires_grad]
    engine, _, _, _ = deepspeed.initialize(args=args, model=net, model_parameters=params)
    micro = engine.train_micro_batch_size_per_gpu()
    rows = [(images[i : i + micro], labels[i : i + micro]) for i in range(0, 32, micro)]
    data = iter(RepeatingLoader(rows))
    losses = [float(engine.train_batch(data_iter=data)) for _ in range(5)]
    evaluated = engine.eval_batch(iter(rows))
    evaluated = float(evaluated) if evaluated is not None else None
    if deepspeed.comm.get_rank() == 0:
        with open(args.out, "w") as file:
            json.dump(
                {
                    "losses": losses,
                    "eval": evaluated,
                    "stages": engine.num_stages,
                    "steps": engine.global_steps,
                },
                file,
            )


if __name__ == "__main__":
    main()
