"""Models of the transformers library (small, random weights) under every stage, unchanged; the
truth is plain torch.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ds_testing import run_ranks
from ds_testing.truth import difference, plain, start, tiny, train
from torch import Tensor, nn

STEPS = 3
BATCH = 2
LENGTH = 8
VOCABULARY = 48
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 28,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "eos_token_id": None,
}
SGD = {"type": "SGD", "params": {"lr": 0.5, "momentum": 0.9}}
KINDS = (
    "gpt2",
    "llama",
    "llama-recomputed",
    "llama-recomputed-reentrant",
    "mixtral",
    "mixtral-grouped",
)


def model_of(kind: str) -> Any:
    family, _, how = kind.partition("-")
    keys: dict[str, Any] = {}
    if family == "gpt2":
        keys = {"num_attention_heads": 2, **dict.fromkeys(("resid_pdrop", "embd_pdrop"), 0.0)}
        keys["attn_pdrop"] = 0.0
    if family == "mixtral":
        keys = {"num_local_experts": 6, "num_experts_per_tok": 1}
    # The library's fast kernel takes no fp64; its loop runs only the experts that have tokens.
    experts = "grouped_mm" if how == "grouped" else "eager"
    model = tiny(family, seed=5, experts=experts, **SIZES | keys)
    if family == "gpt2":
        assert model.lm_head.weight is model.transformer.wte.weight
    if "recomputed" in how:
        model.gradient_checkpointing_enable({"use_reentrant": how.endswith("reentrant")})
        assert model.is_gradient_checkpointing
    return (model if how == "grouped" else model.double()).train()


def batch(step: int, rank: int) -> dict[str, Tensor]:
    """Few different tokens, others on each rank, so that routers send them to few experts."""
    torch.manual_seed(100 + 10 * step + rank)
    ids = torch.randint(4 * rank, 4 * rank + 4, (BATCH, LENGTH))
    return {"input_ids": ids, "labels": ids}


def trained_plainly(kind: str, world: int) -> tuple[list[float], Any, list[set[int]]]:
    """Losses and the trained model of one process that takes all ranks' batches; which experts each
    rank used.
    """
    model = model_of(kind)
    used: list[set[int]] = [set() for _ in range(world)]
    current = 0

    def batch_of(step: int, rank: int) -> dict[str, Tensor]:
        nonlocal current
        current = rank
        return batch(step, rank)

    for block in (m for m in model.modules() if type(m).__name__ == "MixtralTopKRouter"):
        block.register_forward_hook(
            lambda m, a, out: used[current].update(out[-1].flatten().tolist())
        )
    losses = plain(model, batch_of, STEPS, count=world, optimizer=SGD)
    return losses, model, used


def errors_of_stages(kind: str, world: int) -> list[dict[str, float]]:
    """For each stage, how far losses, weights and generated tokens are from those of plain
    torch."""
    losses, truth, used = trained_plainly(kind, world)
    if kind.startswith("mixtral") and world > 1:
        # some expert has no token on some rank
        assert any(mine != set.union(*used) for mine in used), used
    prompt = batch(9, 0)["input_ids"]
    wanted = truth.eval().generate(prompt, max_new_tokens=5, do_sample=False, use_cache=True)
    answers = []
    for stage in range(4):
        zero = {"stage": stage, "param_persistence_threshold": 20}
        sections = {"zero_optimization": zero} if stage else {}
        plugins = {"load": ["ds_zero.plugin"]}
        engine = start(model_of(kind), optimizer=SGD, plugins=plugins, **sections)
        found = train(engine, batch, STEPS)
        tokens = engine.eval().generate(prompt, max_new_tokens=5, do_sample=False, use_cache=True)
        assert torch.equal(tokens, wanted), f"stage {stage}: {tokens} {wanted}"
        engine.destroy()  # stage 3: weights are whole again
        weights = difference(engine.module, truth)
        answers.append({"losses": difference(found, losses), "weights": weights})
    return answers


@pytest.mark.fast_cases("llama-recomputed-reentrant-2", "gpt2-1")
@pytest.mark.parametrize(
    ("kind", "world"), [*((kind, 2) for kind in KINDS), ("gpt2", 1), ("mixtral", 1)]
)
def test_trains_and_generates_as_plain_torch(kind: str, world: int) -> None:
    check(
        run_ranks(world, errors_of_stages, kind, world), 1e-5 if kind.endswith("grouped") else 1e-6
    )


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

    model = model_of("mixtral")
    found = find_leaves(model, LeafModules())
    return sorted(name for name, module in model.named_modules() if module in found)


def test_mixtral_blocks_are_leaves_by_default() -> None:
    assert run_ranks(1, leaves) == [["model.layers.0.mlp", "model.layers.1.mlp"]]
