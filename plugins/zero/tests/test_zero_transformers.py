"""Models of the transformers library (small, random weights) under every stage, unchanged; the
truth is plain torch.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from ds_testing import run_ranks
from torch import nn

STEPS = 3
BATCH = 2
LENGTH = 8
VOCABULARY = 48
KINDS = (
    "gpt2",
    "llama",
    "llama-recomputed",
    "llama-recomputed-reentrant",
    "mixtral",
    "mixtral-grouped",
)


def build(kind: str) -> nn.Module:
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers as hf

    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "use_cache": False,
        "bos_token_id": 0,
        "eos_token_id": None,
    }
    llama = sizes | {
        "hidden_size": 16,
        "intermediate_size": 28,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
    }
    torch.manual_seed(5)
    model: Any
    if kind == "gpt2":
        config = hf.GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=32, **sizes)
        config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
        model = hf.GPT2LMHeadModel(config)
        assert model.lm_head.weight is model.transformer.wte.weight
    elif kind.startswith("mixtral"):
        # The library's fast kernel takes no fp64; its loop runs only the experts that have tokens.
        config = hf.MixtralConfig(num_local_experts=6, num_experts_per_tok=1, **llama)
        config._experts_implementation = "grouped_mm" if kind.endswith("grouped") else "eager"
        model = hf.MixtralForCausalLM(config)
    else:
        model = hf.LlamaForCausalLM(hf.LlamaConfig(**llama))
    if "recomputed" in kind:
        model.gradient_checkpointing_enable({"use_reentrant": kind.endswith("reentrant")})
        assert model.is_gradient_checkpointing
    return (model if kind.endswith("grouped") else model.double()).train()


def batch(step: int, rank: int) -> torch.Tensor:
    """Few different tokens, others on each rank, so that routers send them to few experts."""
    torch.manual_seed(100 + 10 * step + rank)
    return torch.randint(4 * rank, 4 * rank + 4, (BATCH, LENGTH))


def plain(kind: str, world: int) -> tuple[list[float], Any, list[set[int]]]:
    """Losses and the trained model of one process that takes all ranks' batches; which experts each
    rank used.
    """
    model: Any = build(kind)
    used: list[set[int]] = [set() for _ in range(world)]
    rank = 0
    for block in (m for m in model.modules() if type(m).__name__ == "MixtralTopKRouter"):
        block.register_forward_hook(lambda m, a, out: used[rank].update(out[-1].flatten().tolist()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    losses = []
    for step in range(STEPS):
        total = 0.0
        for rank in range(world):
            ids = batch(step, rank)
            loss = model(input_ids=ids, labels=ids).loss / world
            loss.backward()
            total += loss.item()
        losses.append(total)
        optimizer.step()
        optimizer.zero_grad()
    return losses, model, used


def compare(kind: str, world: int) -> list[dict[str, float]]:
    """For each stage, how far losses, weights and generated tokens are from those of plain
    torch."""
    import ds_core
    from ds_core import comm

    truth_losses, truth, used = plain(kind, world)
    if kind.startswith("mixtral") and world > 1:
        # some expert has no token on some rank
        assert any(mine != set.union(*used) for mine in used), used
    prompt = batch(9, 0)
    wanted = truth.eval().generate(prompt, max_new_tokens=5, do_sample=False, use_cache=True)
    answers = []
    for stage in range(4):
        config = {
            "train_micro_batch_size_per_gpu": BATCH,
            "gradient_clipping": 0.0,
            "optimizer": {"type": "SGD", "params": {"lr": 0.5, "momentum": 0.9}},
            "plugins": {"load": ["ds_zero.plugin"]},
        }
        if stage:
            config["zero_optimization"] = {"stage": stage, "param_persistence_threshold": 20}
        engine, *_ = ds_core.initialize(model=build(kind), config=config)
        losses = []
        for step in range(STEPS):
            ids = batch(step, comm.rank())
            loss = engine(input_ids=ids, labels=ids).loss
            engine.backward(loss)
            engine.step()
            total = loss.detach().clone()
            comm.all_reduce(total)
            losses.append(total.item() / world)
        tokens = engine.eval().generate(prompt, max_new_tokens=5, do_sample=False, use_cache=True)
        assert torch.equal(tokens, wanted), f"stage {stage}: {tokens} {wanted}"
        engine.destroy()  # stage 3: weights are whole again
        pairs = zip(engine.module.named_parameters(), truth.named_parameters(), strict=True)
        off = {
            "losses": max(abs(a - b) for a, b in zip(losses, truth_losses, strict=True)),
            "weights": max(float((mine - theirs).abs().max()) for (_, mine), (_, theirs) in pairs),
        }
        answers.append(off)
    return answers


@pytest.mark.fast_cases("llama-recomputed-reentrant-2", "mixtral-2", "gpt2-1")
@pytest.mark.parametrize(
    ("kind", "world"), [*((kind, 2) for kind in KINDS), ("gpt2", 1), ("mixtral", 1)]
)
def test_trains_and_generates_as_plain_torch(kind: str, world: int) -> None:
    check(run_ranks(world, compare, kind, world), 1e-5 if kind.endswith("grouped") else 1e-6)


def check(answers: list[list[dict[str, float]]], tolerance: float = 1e-6) -> None:
    for rank, stages in enumerate(answers):
        for stage, off in enumerate(stages):
            assert max(off.values()) < tolerance, f"rank {rank}, stage {stage}: {off}"


def test_default_leaf_classes_are_those_of_the_installed_version() -> None:
    """A renamed class would silently be no leaf any more."""
    import importlib

    from ds_zero.config import LEAF_CLASSES

    for path in LEAF_CLASSES:
        module, _, name = path.rpartition(".")
        assert issubclass(getattr(importlib.import_module(module), name), nn.Module)


def leaves() -> list[str]:
    from ds_zero.config import LeafModules
    from ds_zero.gather.grouping import find_leaves

    model = build("mixtral")
    found = find_leaves(model, LeafModules())
    return sorted(name for name, module in model.named_modules() if module in found)


def test_mixtral_blocks_are_leaves_by_default() -> None:
    assert run_ranks(1, leaves) == [["model.layers.0.mlp", "model.layers.1.mlp"]]
