"""A classifier with a mixture of experts; its expert parameters get groups of their own."""

import argparse
import json

import deepspeed
import torch
import torch.nn.functional as F
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.utils import groups
from torch import nn


class Net(nn.Module):
    def __init__(self, experts, ep_size, k):
        super().__init__()
        self.inner = nn.Linear(12, 8)
        self.moe = MoE(
            hidden_size=8,
            expert=nn.Linear(8, 8),
            num_experts=experts,
            ep_size=ep_size,
            k=k,
            capacity_factor=4.0,
            eval_capacity_factor=4.0,
            min_capacity=0,
            noisy_gate_policy=None,
            top2_2nd_expert_sampling=False,  # or each framework draws on its own
        )
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        x, aux, counts = self.moe(F.relu(self.inner(x)))
        return self.head(x), aux


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--out")
    parser.add_argument("--ep", type=int, default=1)
    parser.add_argument("--top", type=int, default=1)
    deepspeed.add_config_arguments(parser)
    args = parser.parse_args()
    deepspeed.init_distributed()
    torch.manual_seed(6)
    net = Net(4, args.ep, args.top)
    made = torch.Generator().manual_seed(12)
    for name, param in net.named_parameters():  # the same values however experts are spread
        if "experts" not in name:
            param.data.copy_(torch.randn(param.shape, generator=made) * 0.3)
        else:
            param.data.fill_(0.1)
    parameters = {"params": [p for p in net.parameters() if p.requires_grad], "name": "parameters"}
    parameters = split_params_into_different_moe_groups_for_optimizer(parameters)
    engine, _, _, _ = deepspeed.initialize(args=args, model=net, model_parameters=parameters)
    assert groups._get_data_parallel_world_size() == deepspeed.comm.get_world_size()
    made = torch.Generator().manual_seed(40 + engine.global_rank)
    losses = []
    for _ in range(5):
        x = torch.randn(engine.train_micro_batch_size_per_gpu(), 12, generator=made)
        y = (x.sum(1).abs() * 2).long() % 5
        logits, aux = engine(x)
        loss = F.cross_entropy(logits, y) + 0.01 * aux
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    if engine.global_rank == 0:
        with open(args.out, "w") as file:
            json.dump({"losses": losses}, file)


if __name__ == "__main__":
    main()
