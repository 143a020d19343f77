"""Models with AutoEP against the same models in one process of plain torch: logits, losses,
weights.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from autoep_models import FAMILIES, STEPS, alone, hugging_face, ids, settings, texts
from ds_testing import run_ranks
from ds_testing.truth import difference, train


def errors(kind: str, world: int, cases: list[tuple[int, int]]) -> dict[str, dict[str, float]]:
    """For each (ep, stage), how far losses, logits and weights are from plain torch."""
    import ds_core

    truth = hugging_face(kind)
    losses = alone(truth, world)
    with torch.no_grad():
        wanted = truth(input_ids=ids(99, 0), labels=ids(99, 0), output_router_logits=True)
        generated = truth.eval().generate(
            ids(99, 1), max_new_tokens=4, do_sample=False, use_cache=True
        )
    found = {}
    for ep, stage in cases:
        model = hugging_face(kind)
        engine, *_ = ds_core.initialize(
            model=model, model_parameters=list(model.parameters()), config=settings(ep, stage)
        )
        got = train(engine, texts, STEPS)
        with torch.no_grad():
            out = engine(input_ids=ids(99, 0), labels=ids(99, 0), output_router_logits=True)
            tokens = engine.eval().generate(
                ids(99, 1), max_new_tokens=4, do_sample=False, use_cache=True
            )
        engine.destroy()  # weights are whole again
        found[f"ep {ep}, stage {stage}"] = {
            "losses": difference(got, losses),
            "logits": float((out.logits - wanted.logits).abs().max()),
            "router": float(abs(out.aux_loss - wanted.aux_loss)) if kind in WITH_AUX else 0.0,
            "generated": float(not torch.equal(tokens, generated)),
            "weights": difference(model, truth),
        }
    return found


WITH_AUX = ("mixtral", "qwen3_moe", "qwen3_5_moe")
"""Families whose output has the auxiliary loss."""
CASES = {1: [(1, 0)], 2: [(2, 1), (2, 3)], 4: [(4, 0), (2, 2)]}
"""(ep, stage) for each number of ranks."""
EVERY = {
    1: [(1, 1), (1, 3)],
    2: [(2, 0), (2, 2), (1, 2)],
    4: [(4, 1), (4, 2), (4, 3), (2, 0), (2, 3), (1, 1)],
}
"""The rest of the product, but for what says nothing new."""


def check(kind: str, world: int, cases: list[tuple[int, int]]) -> None:
    for rank, found in enumerate(run_ranks(world, errors, kind, world, cases)):
        for case, off in found.items():
            # The library adds up losses, norms and scores in fp32, whatever the model's dtype.
            within = {
                "losses": 1e-6,
                "logits": 1e-9,
                "weights": 1e-9,
                "router": 1e-9,
                "generated": 0,
            }
            assert all(off[what] <= within[what] for what in within), f"rank {rank}, {case}: {off}"


@pytest.mark.fast_cases("mixtral-2")
@pytest.mark.parametrize(
    "world", [2, *(pytest.param(world, marks=pytest.mark.slow) for world in (1, 4))]
)
@pytest.mark.parametrize(
    "kind",
    [
        "mixtral",
        "deepseek_v3",
        *(
            pytest.param(k, marks=pytest.mark.slow)
            for k in FAMILIES
            if k not in ("mixtral", "deepseek_v3")
        ),
    ],
)
def test_trains_as_plain_transformers(kind: str, world: int) -> None:
    check(kind, world, CASES[world])


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("kind", FAMILIES)
def test_trains_as_plain_transformers_in_every_other_case(kind: str, world: int) -> None:
    check(kind, world, EVERY[world])


# -- other ways to run -----------------------------------------------------------------------------


def variants(world: int) -> dict[str, float]:
    """How far losses are from those of data parallelism alone, in ways that plain torch has no one
    answer for.
    """
    import ds_core

    ways: dict[str, dict[str, Any]] = {
        "fp32": {},
        "bf16": {"bf16": {"enabled": True}},
        "autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
        "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}},
        "accumulated": {"gradient_accumulation_steps": 2},
        "recomputed": {},
        "recomputed, re-entrant": {},
        "module by module": {
            "expert_parallel": {"enabled": True, "autoep_size": world, "use_grouped_mm": False}
        },
    }
    found = {}
    for name, keys in ways.items():
        losses = []
        for ep, stage in ((0, 1), (world, 1), (world, 3)):
            model = hugging_face("deepseek_v3").float()
            if name.startswith("recomputed"):
                model.gradient_checkpointing_enable({"use_reentrant": name.endswith("entrant")})
            config = settings(ep, stage) | {
                k: v for k, v in keys.items() if ep or k != "expert_parallel"
            }
            engine, *_ = ds_core.initialize(model=model, config=config)
            losses.append(train(engine, texts, 3))
            engine.destroy()
        for stage, got in ((1, losses[1]), (3, losses[2])):
            found[f"{name}, stage {stage}"] = difference(got, losses[0])
    return found


@pytest.mark.slow
def test_other_precisions_and_recomputation_agree_with_data_parallelism() -> None:
    for found in run_ranks(2, variants, 2):
        for name, off in found.items():
            assert off < (2e-2 if name[:2] in ("bf", "fp", "au") and "32" not in name else 2e-6), (
                f"{name}: {off}"
            )


def memory(ep: int, stage: int) -> dict[str, int]:
    """Bytes of experts' weights, and of all tensors that this has made and are alive, after a
    step."""
    import gc

    import ds_core

    gc.collect()
    # what earlier tests have left in this process
    others = {t.untyped_storage().data_ptr() for t in live()}
    model = hugging_face("qwen3_moe", moe_intermediate_size=512)
    engine, *_ = ds_core.initialize(model=model, config=settings(ep, stage))
    del model
    train(engine, texts, 1)
    gc.collect()
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in live()}
    experts = [p for n, p in engine.module.named_parameters() if ".experts." in n]
    made = sum(size for place, size in storages.items() if place not in others)
    out = {"experts": sum(p.untyped_storage().nbytes() for p in experts), "all": made}
    engine.destroy()
    return out


def live() -> list[torch.Tensor]:
    """Every tensor of this process."""
    import gc

    return [t for t in gc.get_objects() if isinstance(t, torch.Tensor) and not t.is_meta]


def memories(cases: list[tuple[int, int]]) -> list[dict[str, int]]:
    return [memory(*case) for case in cases]


@pytest.mark.slow
def test_each_rank_holds_only_its_share_of_experts() -> None:
    whole = 2 * 8 * 3 * 512 * 16 * 8  # layers, experts, weights of each, bytes
    for one, two, four in run_ranks(4, memories, [(1, 0), (2, 0), (4, 0)]):
        assert [one["experts"], two["experts"], four["experts"]] == [whole, whole // 2, whole // 4]
        # Weights and two moments at least, and no copy of what the others hold.
        assert one["all"] - two["all"] >= 1.5 * whole and one["all"] - four["all"] >= 2.25 * whole
        assert two["all"] < 0.53 * one["all"] and four["all"] < 0.28 * one["all"]


def events() -> list[Any]:
    """What monitors are told on rank 0 after one step, and how often this rank's routers chose each
    expert.
    """
    import ds_core

    told: list[tuple[str, float]] = []

    class Recorder:
        name = "recorder"
        enabled = True

        def write_events(self, events: Any) -> None:
            told.extend((e[0], e[1]) for e in events)

        def flush(self) -> None:
            pass

        close = flush

    engine, *_ = ds_core.initialize(model=hugging_face("deepseek_v3"), config=settings(2, 0))
    if engine.ctx.rank == 0:
        engine.monitor.monitors.append(Recorder())
    counts = torch.zeros(8)

    def count(module: Any, args: Any, out: Any) -> None:
        counts.add_(torch.bincount(out[-1].flatten(), minlength=8))

    engine.module.model.layers[1].mlp.gate.register_forward_hook(count)
    train(engine, texts, 1)
    engine.destroy()
    return [{name: value for name, value in told if "MoE" in name}, counts.tolist()]


def test_load_of_experts_goes_to_monitors() -> None:
    (told, first), (nothing, second) = run_ranks(2, events)
    chosen = [a + b for a, b in zip(first, second, strict=True)]
    shares = [8 * c / sum(chosen) for c in chosen]
    wanted = {f"expert_load_{i}": share for i, share in enumerate(shares)} | {
        "load_max": max(shares),
        "dropped": 0.0,
    }
    assert nothing == {}
    assert told == pytest.approx(
        {f"Train/MoE/model.layers.1.mlp/{key}": value for key, value in wanted.items()}
    )
