"""With dropout on, every layout trains as one process does: the same losses and weights."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import ds_activation_checkpointing  # noqa: F401  - these need them installed
import ds_checkpoint  # noqa: F401
import ds_tensor_parallel  # noqa: F401
import ds_zero  # noqa: F401
import pytest
from dropping_models import DEALT, MICRO, Found, Net, batch, piped, run
from ds_testing import run_ranks
from ds_testing.truth import loss_of, same, start, train, whole_weights

TP: dict[str, Any] = {"tensor_parallel": {"autotp_size": 2}}
SP: dict[str, Any] = {"sequence_parallel": {"size": 2}}
EP: dict[str, Any] = {"expert_parallel": {"autoep_size": 2}}
X: dict[str, Any] = {"sequence_parallel": {"size": 2, "inputs": {"x": 1}}}
RING: dict[str, Any] = {"sequence_parallel": {"size": 2, "inputs": {"x": 1}, "mode": "ring"}}


def again(*modules: str) -> dict[str, Any]:
    return {"activation_checkpointing": {"modules": list(modules) or "auto"}}


def zero(stage: int) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, "reduce_bucket_size": 100}}


# Losses of transformers' models are summed in fp32 where sequences are divided.
EXACT = 1e-15
FP32 = 2e-6

CASES: dict[str, tuple[str, int, int, int, dict[str, Any]]] = {
    # model, micro-batches of a step, ranks, accumulation, sections
    "dp2": ("blocks", 2, 2, 1, {}),
    "dp4": ("blocks", 4, 4, 1, {}),
    "dp2, gas 2": ("blocks", 4, 2, 2, {}),
    "z1, recomputed": ("blocks", 2, 2, 1, {**zero(1), **again("Block")}),
    "z2, gas 2": ("blocks", 4, 2, 2, zero(2)),
    "z3, recomputed": ("blocks", 4, 2, 2, {**zero(3), **again("Block")}),
    "encoder": ("encoder", 2, 2, 1, {}),
    "ep2": ("experts", 2, 2, 1, EP),
    "ep2, dp2, z1": ("experts", 4, 4, 1, {**EP, **zero(1)}),
    "tp2": ("blocks", 1, 2, 1, TP),
    "tp2, gpt2": ("gpt2", 1, 2, 1, TP),
    "tp2, gpt2, recomputed": ("gpt2", 1, 2, 1, {**TP, **again()}),
    "tp2, gpt2, eager": ("gpt2, eager", 1, 2, 1, TP),
    "tp2, bert": ("bert", 1, 2, 1, TP),
    "tp2, dp2, z3": ("gpt2", 2, 4, 1, {**TP, **zero(3)}),
    "sp2": ("attention", 1, 2, 1, X),
    "sp2, recomputed": ("attention", 1, 2, 1, {**X, **again("Block", "Attention")}),
    "sp2, dp2": ("attention", 2, 4, 1, X),
    "sp2, ring": ("blocks", 1, 2, 1, RING),
    "sp2, llama": ("llama", 1, 2, 1, SP),
    "sp2, tp2, llama": ("llama", 1, 4, 1, {**SP, **TP}),
}


@pytest.mark.fast_cases("dp2", "z3, recomputed", "ep2", "tp2", "sp2")
@pytest.mark.parametrize("case", CASES)
def test_as_one_process(case: str) -> None:
    kind, micros, ranks, gas, config = CASES[case]
    found: Found = run_ranks(ranks, _run, kind, gas, config)[0]
    # The plain run: no section but this one.
    wanted = run(kind, micros)
    same(found[1], wanted[1], EXACT)
    same(found[0], wanted[0], FP32 if "llama" in case else EXACT)


def _run(kind: str, gas: int, config: dict[str, Any]) -> Found:
    return run(kind, gas, 2 if "expert_parallel" in config else 1, **config)


@pytest.mark.slow
@pytest.mark.parametrize("config", [SP, {**SP, **again()}], ids=["kept", "recomputed"])
def test_parts_of_a_sequence_that_differ_in_length(config: dict[str, Any]) -> None:
    found = run_ranks(2, _seven, config)[0]
    same(found, _seven({}), FP32)


def _seven(config: dict[str, Any]) -> Found:
    return run("llama", 1, length=7, **config)


PIPELINES: dict[str, tuple[int, int, dict[str, Any]]] = {
    # ranks, accumulation, arguments of `piped`
    "pp2": (2, 4, {}),
    "pp2, recomputed": (2, 4, {"interval": 1}),
    "pp2, interleaved": (
        *(2, 4),
        {"chunks": 2, "pipeline": {"schedule": "interleaved", "chunks": 2}},
    ),
    "pp2, zero bubble": (2, 4, {"pipeline": {"schedule": "zero_bubble"}}),
    "pp2, dp2, z1": (4, 2, zero(1)),
    "pp4, recomputed": (4, 4, {"interval": 1, "stages": 4}),
}


@pytest.mark.fast_cases("pp2, recomputed")
@pytest.mark.parametrize("case", PIPELINES)
def test_a_pipeline_as_one_process(case: str) -> None:
    ranks, gas, more = PIPELINES[case]
    stages = run_ranks(ranks, _piped, gas, more)
    losses, weights = piped(1, 4)
    for found in stages:
        same(found[0], losses, EXACT)
        same(found[1], {name: weights[name] for name in found[1]}, EXACT)
    assert {name for found in stages for name in found[1]} == weights.keys()


def _piped(gas: int, more: dict[str, Any]) -> Found:
    return piped(gas=gas, **{"stages": 2} | more)


SAMPLES = 12


def _loaded(micro: int, gas: int) -> Found:
    """Two epochs of the engine's own loader, whose order the default key names."""
    data = [batch(0, number)[0] for number in range(SAMPLES)]
    engine = start(
        Net().double(), micro=micro, gas=gas, training_data=data, reproducibility={"seed": 5}
    )
    losses: list[float] = []
    for _ in range(2):
        for x in engine.training_dataloader:
            loss = loss_of(engine, x)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    weights = whole_weights(engine)
    engine.destroy()
    return losses, weights


def test_the_engines_own_loader() -> None:
    # The mean over a step's samples is that of means of equal parts.
    _, wanted = _loaded(4, 1)
    for micro, gas in ((2, 1), (1, 2)):
        for _, found in run_ranks(2, _loaded, micro, gas):
            same(found, wanted, EXACT)
    same(_loaded(2, 2)[1], wanted, EXACT)


def _half(folder: str, gas: int) -> None:
    engine = start(Net().double(), micro=MICRO, gas=gas, reproducibility=DEALT, **zero(2))
    train(engine, batch, 2)
    engine.save_checkpoint(folder)
    engine.destroy()


def _rest(folder: str, gas: int, stage: int) -> Found:
    engine = start(Net().double(), micro=MICRO, gas=gas, reproducibility=DEALT, **zero(stage))
    engine.load_checkpoint(folder)
    losses = train(engine, batch, range(2, 4))
    weights = whole_weights(engine)
    engine.destroy()
    return losses, weights


@pytest.mark.slow
def test_a_run_goes_on_in_another_layout(tmp_path: Path) -> None:
    folder = str(tmp_path)
    run_ranks(2, _half, folder, 2)
    wanted = _rest(folder, 4, 1)
    for ranks, gas, stage in ((2, 2, 3), (4, 1, 2)):
        same(run_ranks(ranks, _rest, folder, gas, stage)[0], wanted, EXACT)
