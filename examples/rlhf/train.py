"""A tiny model learns to count from rewards alone: it writes, a rule checks the text, and what
scored above the average of its group becomes more likely (GRPO, with one update per batch).

One engine writes and trains, with the same weights: section ``hybrid_engine`` gives it
``generate``.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn import functional as F

import ds_core
from ds_core import comm

# tokens 0 .. 9 are the digits, 10 begins a prompt
DIGITS = 10
START = 10
PADDING = 11
ANSWER = 3


def build() -> Any:
    """Some 30,000 weights, random."""
    sizes: dict[str, Any] = {
        "vocab_size": 12,
        "bos_token_id": START,
        "eos_token_id": None,
        "pad_token_id": PADDING,
    }
    sizes |= {
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(max_position_embeddings=32, **sizes)
    )


def reward(prompts: Tensor, answers: Tensor) -> Tensor:
    """The share of each answer that counts on from the prompt's digit: 8 -> 9 0 1. [b, 2], [b,
    ANSWER] -> [b].
    """
    wanted = (prompts[:, 1:] + torch.arange(1, ANSWER + 1, device=prompts.device)) % DIGITS
    return (answers == wanted).float().mean(1)


def advantages(rewards: Tensor, group: int) -> Tensor:
    """How much better than the other answers to the same prompt each one is, in standard
    deviations.
    """
    each = rewards.view(-1, group)
    return ((each - each.mean(1, keepdim=True)) / (each.std(1, keepdim=True) + 1e-4)).flatten()


def loss_of(engine: Any, texts: Tensor, better: Tensor) -> Tensor:
    """Policy gradient: minus the mean log-probability of the answers' tokens, weighted by the
    advantage.
    """
    logits = engine(input_ids=texts).logits[:, -ANSWER - 1 : -1]
    chances = -F.cross_entropy(
        logits.flatten(0, 1).float(), texts[:, -ANSWER:].flatten(), reduction="none"
    )
    return -(chances.view(-1, ANSWER) * better[:, None]).mean()


def train(config: Any, steps: int, group: int = 16) -> list[float]:
    """The mean reward of all ranks at each step."""
    engine, *_ = ds_core.initialize(model=build(), config=config)
    device = engine.ctx.accelerator.current_device()
    prompts_each = engine.train_micro_batch_size_per_gpu() // group
    torch.manual_seed(1 + comm.rank())  # each rank has prompts and draws of its own
    seen = []
    for step in range(steps):
        digits = torch.randint(0, DIGITS, (prompts_each, 1), device=device)
        prompts = torch.cat([torch.full_like(digits, START), digits], 1)
        texts = engine.generate(
            prompts, do_sample=True, max_new_tokens=ANSWER, num_return_sequences=group
        )
        rewards = reward(texts[:, :2], texts[:, 2:])
        engine.backward(loss_of(engine, texts, advantages(rewards, group)))
        engine.step()
        mean = rewards.mean()
        if comm.world_size() > 1:
            comm.all_reduce(mean)
        seen.append(mean.item() / comm.world_size())
        if comm.rank() == 0 and step % 20 == 0:
            print(f"step {step:4}  reward {seen[-1]:.3f}", flush=True)
    stats = engine.generation_stats()
    if comm.rank() == 0:
        speed = stats.new_tokens / stats.seconds
        print(
            f"reward {seen[-1]:.3f}; {stats.new_tokens} tokens written in {stats.seconds:.1f} s "
            f"({speed:.0f} per s)"
        )
    engine.destroy()
    return seen


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    config = Path(__file__).with_name("ds_config.json")
    parser.add_argument("--deepspeed_config", type=Path, default=config, help="the config file")
    parser.add_argument("--steps", type=int, default=200)
    given = parser.parse_args()
    train(given.deepspeed_config, given.steps)
