"""A GPT as language-model scripts have it: zero.Init under stage 3, tied weights, safe_* access, a
16-bit export.
"""

import argparse
import json
import os

import deepspeed
import torch
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
)
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.ln1 = nn.LayerNorm(width)
        self.ln2 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x):
        q, k, v = self.qkv(self.ln1(x)).chunk(3, -1)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    def __init__(self, vocab=32, width=16, layers=3):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits = nn.functional.linear(self.norm(x), self.embed.weight)
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", -1)))
    parser.add_argument("--out")
    parser.add_argument("--work")
    parser.add_argument("--config")
    args = parser.parse_args()
    with open(args.config) as file:
        config = json.load(file)
    deepspeed.init_distributed()
    torch.manual_seed(2)
    stage = config["zero_optimization"]["stage"]
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=stage == 3):
        model = GPT()
    with deepspeed.zero.GatheredParameters(
        list(model.parameters()), modifier_rank=0, enabled=stage == 3
    ):
        if torch.distributed.get_rank() == 0:
            made = torch.Generator().manual_seed(4)
            for name, param in model.named_parameters():
                if param.dim() > 1:
                    values = torch.randn(param.shape, generator=made) * 0.1
                    param.data.copy_(values)
                else:
                    param.data.fill_(1.0 if "ln" in name or name.startswith("norm.w") else 0.0)
    if stage < 3:
        for param in model.parameters():
            torch.distributed.broadcast(param.data, 0)
    decay = [p for n, p in model.named_parameters() if "bias" not in n]
    rest = [p for n, p in model.named_parameters() if "bias" in n]
    grouped = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    engine, optimizer, _, scheduler = deepspeed.initialize(
        model=model, model_parameters=grouped, config=config
    )
    made = torch.Generator().manual_seed(30 + engine.global_rank)
    losses = []
    masters = []
    grads = []
    weight = engine.module.blocks[1].mlp[0].weight
    for _ in range(4 * engine.gradient_accumulation_steps()):
        tokens = torch.randint(0, 32, (engine.train_micro_batch_size_per_gpu(), 8), generator=made)
        loss = engine(tokens.to(engine.device))
        engine.backward(loss)
        # stage 0 of fp32 has no access to states
        if stage and engine.is_gradient_accumulation_boundary():
            grads.append(float(safe_get_full_grad(weight).float().norm()))
        engine.step()
        losses.append(loss.item())
    if stage:
        masters.append(float(safe_get_full_fp32_param(weight).norm()))
        masters.append(float(safe_get_full_optimizer_state(weight, "exp_avg").norm()))
    assert engine.zero_optimization_stage() == stage
    engine.save_checkpoint(args.work)
    with open(os.path.join(args.work, "latest")) as file:
        assert file.read().strip() == f"global_step{engine.global_steps}"
    if engine.global_rank == 0:
        with open(args.out, "w") as file:
            json.dump({"losses": losses, "masters": masters, "grads": grads}, file)


if __name__ == "__main__":
    main()
