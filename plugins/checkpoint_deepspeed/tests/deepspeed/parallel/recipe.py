"""Model-parallel models, and the checkpoints beside this file: ``recipe.py FOLDER KIND STAGE`` with
real DeepSpeed.

They were written by DeepSpeed 0.19.8 on the CPU, after 3 of 5 steps: moe-1 and pipe-1 and tp-3 on 4
ranks, the others on 2. losses.json holds rank 0's loss of every step. Without DeepSpeed the same
models are made of ds_core's parts.
"""

import json
import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

try:
    import deepspeed
    from deepspeed.moe.layer import MoE
    from deepspeed.moe.utils import (
        split_params_into_different_moe_groups_for_optimizer as groups_of,
    )
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
except ImportError:
    from ds_moe import MoE
    from ds_moe.utils import split_params_into_different_moe_groups_for_optimizer as groups_of
    from ds_pipeline import LayerSpec, PipelineModule, TiedLayerSpec

GAS = 2  # micro-batches of a pipeline's step


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def config(stage, kind):
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": GAS if kind.startswith("pipe") else 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
    }


# -- pipeline: the first and the last layer are tied


class Embedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(11, 6) * 0.3)

    def forward(self, x):
        return F.embedding(x, self.weight)


def head(layer, x):
    return F.linear(x, layer.weight)


class Norm(nn.Module):
    """With a buffer, and a weight that is not trained."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((6,), 1.5), requires_grad=False)
        self.register_buffer("shift", torch.full((6,), 0.25))
        self.weight = nn.Parameter(torch.ones(6))

    def forward(self, x):
        return F.layer_norm(x, (6,), self.weight) * self.scale + self.shift


def pipeline(kind, stages):
    torch.manual_seed(3)
    first = TiedLayerSpec("embed", Embedding)
    last = TiedLayerSpec("embed", Embedding, forward_fn=head)
    if kind == "pipe-untied":
        first = LayerSpec(Embedding)
        last = LayerSpec(nn.Linear, 6, 11)
    return PipelineModule(
        layers=[
            first,
            LayerSpec(nn.Linear, 6, 6),
            nn.Tanh(),
            LayerSpec(Norm),
            LayerSpec(nn.Linear, 6, 6),
            last,
        ],
        loss_fn=lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten()),
        num_stages=stages,
        partition_method="uniform",
        base_seed=42,
        seed_layers=True,
    )


def pipe_batches(step, rank):
    for micro in range(GAS):
        x = torch.randint(0, 11, (4, 5), generator=seeded(100 * step + 10 * rank + micro))
        yield x, x


# -- mixture of experts


class MoENet(nn.Module):
    def __init__(self, ep):
        super().__init__()
        self.inner = nn.Linear(12, 8)
        self.head = nn.Linear(8, 5)
        self.moe = MoE(
            hidden_size=8,
            expert=nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 8)),
            num_experts=4,
            ep_size=ep,
            k=1,
            capacity_factor=4.0,
            eval_capacity_factor=4.0,
            min_capacity=0,
            noisy_gate_policy=None,
        )
        made = seeded(12)
        with torch.no_grad():
            for name, param in self.named_parameters():
                if "experts" not in name:
                    param.copy_(torch.randn(param.shape, generator=made) * 0.3)
                else:  # experts of one rank differ, those of one number on different ranks as well
                    rank = dist.get_rank() % ep
                    param.copy_(torch.randn(param.shape, generator=seeded(rank + len(name))) * 0.3)

    def forward(self, x, y):
        x, aux, _ = self.moe(F.relu(self.inner(x)))
        return F.cross_entropy(self.head(x), y) + 0.01 * aux


def moe_batch(step, rank):
    x = torch.randn(4, 12, generator=seeded(100 * step + rank))
    return x, (x.sum(1).abs() * 2).long() % 5


# -- tensor parallelism


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        if ctx.group is not None:
            dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        if group is not None:
            dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class TPNet(nn.Module):
    """mpu: None for the whole model in one process."""

    def __init__(self, mpu):
        super().__init__()
        self.size = 1
        self.rank = 0
        self.group = None
        if mpu is not None:
            self.size = mpu.get_model_parallel_world_size()
            self.rank = mpu.get_model_parallel_rank()
            self.group = mpu.get_model_parallel_group()
        self.up, self.bias = (
            self.cut(torch.randn(8, 6, generator=seeded(1)), 0),
            self.cut(torch.zeros(8), 0),
        )
        self.down = self.cut(torch.randn(6, 8, generator=seeded(2)), 1)
        self.norm = nn.LayerNorm(6)

    def cut(self, whole, dim):
        param = nn.Parameter(0.3 * whole.chunk(self.size, dim)[self.rank].clone())
        param.model_parallel = param.tensor_model_parallel = self.size > 1
        return param

    def forward(self, x):
        hidden = torch.tanh(F.linear(Copy.apply(x, self.group), self.up, self.bias))
        out = self.norm(Reduce.apply(F.linear(hidden, self.down), self.group) + x)
        return out.pow(3).mean() + out.sin().mean()


class Mpu:
    """Neighbouring ranks share a model."""

    def __init__(self, tp):
        world = dist.get_world_size()
        rank = dist.get_rank()
        for first in range(0, world, tp):
            group = dist.new_group(list(range(first, first + tp)))
            self.model = group if first <= rank < first + tp else getattr(self, "model", None)
        for first in range(tp):
            group = dist.new_group(list(range(first, world, tp)))
            self.data = group if rank % tp == first else getattr(self, "data", None)

    def get_model_parallel_group(self):
        return self.model

    def get_data_parallel_group(self):
        return self.data

    def get_model_parallel_rank(self):
        return dist.get_rank(self.model)

    def get_model_parallel_world_size(self):
        return dist.get_world_size(self.model)

    def get_data_parallel_rank(self):
        return dist.get_rank(self.data)

    def get_data_parallel_world_size(self):
        return dist.get_world_size(self.data)

    get_tensor_model_parallel_group = get_model_parallel_group
    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size


def tp_batch(step, rank):
    return torch.randn(4, 6, generator=seeded(100 * step + rank))


# -- running


def engine_of(initialize, kind, stage, parts):
    """parts: pipeline stages, expert-parallel or tensor-parallel ranks."""
    settings = config(stage, kind)
    if kind.startswith("pipe"):
        net = pipeline(kind, parts)
        return initialize(model=net, model_parameters=list(net.parameters()), config=settings)[0]
    if kind == "moe":
        net = MoENet(parts)
        grouped = groups_of({"params": list(net.parameters()), "name": "all"})
        return initialize(model=net, model_parameters=grouped, config=settings)[0]
    mpu = Mpu(parts) if parts > 1 else None
    net = TPNet(mpu)
    if kind == "tp-told":
        net.universal_checkpoint_info = {
            "universal_checkpoint_version": 0.2,
            "tp_replicated_parameter_patterns": ["norm.*"],
            "parameter_with_row_parallelism_patterns": ["down"],
        }
    more = {} if mpu is None else {"mpu": mpu}
    return initialize(model=net, model_parameters=list(net.parameters()), config=settings, **more)[
        0
    ]


def step_of(engine, kind, step, rank):
    """The loss of a step; rank: data-parallel."""
    if kind.startswith("pipe"):
        return engine.train_batch(pipe_batches(step, rank)).item()
    loss = engine(*moe_batch(step, rank)) if kind == "moe" else engine(tp_batch(step, rank))
    engine.backward(loss)
    engine.step()
    return loss.item()


def main(folder, kind, stage):
    deepspeed.init_distributed(dist_backend="gloo")
    engine = engine_of(deepspeed.initialize, kind, stage, 2)
    tp = 2 if kind.startswith(("pipe", "tp")) else 1
    rank = (
        dist.get_rank() // tp
        if kind.startswith("tp")
        else dist.get_rank() % (dist.get_world_size() // tp)
    )
    losses = []
    for step in range(5):
        if step == 3:
            engine.save_checkpoint(folder, tag="three", client_state={"note": "hello"})
        losses.append(step_of(engine, kind, step, rank))
    if dist.get_rank() == 0:
        with open(f"{folder}/losses.json", "w") as file:
            json.dump(losses, file)
    dist.barrier()
    # one in ten ends of a process that used DeepSpeed is an abort ("terminate called ...")
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
