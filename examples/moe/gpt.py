"""The GPT of examples/gpt with a mixture of experts in every block; each rank has half of the
experts. Start it with

    dscore run --nproc 2 examples/moe/gpt.py
    tensorboard --logdir runs          # Train/MoE/...: each expert's load, dropped tokens, the auxiliary loss

It keeps a checkpoint in runs/moe and, started again, goes on from there; with --nproc 1 --ep 1 too.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1] / "gpt"))

from ds_command_kit.progress import progress
from ds_moe import MoE
from model import GPT
from torch.nn import functional as F
from train import Text

import ds_core


class Block(nn.Module):
    """Attention and a mixture of experts, each added to its input; `l_aux` is the last forward's
    auxiliary loss.
    """

    def __init__(self, dense: nn.Module, width: int, experts: int, ep: int) -> None:
        super().__init__()
        self.heads, self.norm1, self.norm2, self.qkv, self.proj = (
            getattr(dense, name) for name in ("heads", "norm1", "norm2", "qkv", "proj")
        )
        expert = nn.Sequential(dense.up, nn.GELU(), dense.down)
        self.moe = MoE(width, expert, num_experts=experts, ep_size=ep, k=2, capacity_factor=1.25)
        self.l_aux: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        b, t, w = x.shape
        q, k, v = (
            self.qkv(self.norm1(x))
            .view(b, t, 3, self.heads, w // self.heads)
            .permute(2, 0, 3, 1, 4)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(b, t, w))
        out, self.l_aux, _ = self.moe(self.norm2(x))
        return x + out


class MoEGPT(GPT):
    def __init__(self, experts: int, ep: int, width: int = 128) -> None:
        super().__init__(width=width)
        self.blocks = nn.Sequential(*(Block(block, width, experts, ep) for block in self.blocks))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss = super().forward(x, y)
        return loss + 0.01 * sum(block.l_aux for block in self.blocks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps in all")
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument(
        "--ep", type=int, default=2, help="ranks over which the experts are divided"
    )
    parser.add_argument(
        "--run", type=Path, default=Path("runs/moe"), help="folder of the checkpoint"
    )
    config = Path(__file__).with_name("ds_config.json")
    parser.add_argument("--deepspeed_config", type=Path, default=config, help="the config file")
    args = parser.parse_args()

    torch.manual_seed(0)
    model = MoEGPT(args.experts, args.ep)
    engine, _, loader, _ = ds_core.initialize(
        args=args, model=model, training_data=Text(model.context)
    )
    path, _ = engine.load_checkpoint(args.run, missing_ok=True)
    if path is not None and engine.global_rank == 0:
        print(f"resumed from step {engine.global_steps}", flush=True)
    batches = iter(ds_core.RepeatingLoader(loader))
    with progress(engine, args.steps) as bar:
        while engine.global_steps < args.steps:
            x, y = next(batches)
            loss = engine(x.to(engine.device), y.to(engine.device))
            engine.backward(loss)
            engine.step()
            bar.update(loss)
    engine.save_checkpoint(args.run)
    torch.manual_seed(1)
    text = model.eval().write(b"The ", 200)  # on all ranks: each has half of the experts
    if engine.global_rank == 0:
        print(
            f"\n--- what it writes after {args.steps} steps ---\n{text}\n---\nloss "
            f"{loss.item():.3f}",
            flush=True,
        )
    engine.destroy()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
