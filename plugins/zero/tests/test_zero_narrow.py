"""Weights in 16 bits without masters: ``bf16_master_weights_and_grads``, ``bf16_optimizer_states``
and fp16's key.

Every stage, with and without offload, does what one process does that updates 16-bit weights with
the same optimizer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ds_optimizers
import pytest
import torch
from ds_testing import run_ranks
from ds_testing.truth import start
from torch import Tensor, nn

from ds_core.errors import ConfigError

NARROW = {"bf16_master_weights_and_grads": True}
STATES = {"bf16_optimizer_states": True}
SMALL = {"reduce_bucket_size": 100, "param_persistence_threshold": 5}
CPU = {"offload_optimizer": {"device": "cpu"}}
ALL = {"offload_param": {"device": "cpu"}}
CASES: list[dict[str, Any]] = [
    {"stage": 0},
    {"stage": 1},
    {"stage": 2, **CPU},
    {"stage": 2, "offload_optimizer": {"device": "cpu", "super_offload": True}},
    {"stage": 3},
    {"stage": 3, **CPU, **ALL},
    {"stage": 3, "offload_optimizer": {"device": "nvme"}},
]


def net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(
        nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 9), nn.Tanh(), nn.Linear(9, 3)
    ).to(dtype)


def batch(step: int, rank: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank)).to(dtype)


def alone(steps: int, world: int, wide: bool, gas: int = 1) -> dict[str, Tensor]:
    """Plain torch around the class: weights, their gradients and, unless `wide`, the moments in
    bf16.
    """
    model = net(torch.bfloat16)
    optimizer = ds_optimizers.AdamW(
        model.parameters(), lr=0.01, weight_decay=0.1, fp32_optimizer_states=wide
    )
    for step in range(steps):
        grads: dict[str, Tensor] = {}
        for rank in range(world):
            optimizer.zero_grad()
            for part in range(gas):
                loss = (
                    model(batch(step * gas + part, rank, torch.bfloat16)).float().square().mean()
                    / gas
                )
                loss.backward()
            for name, param in model.named_parameters():
                assert param.grad is not None
                grads[name] = grads.get(name, torch.zeros_like(param)) + param.grad / world
        for name, param in model.named_parameters():
            param.grad = grads[name]
        optimizer.step()
    return {n: p.detach() for n, p in model.named_parameters()}


def engine_of(
    zero: dict[str, Any], bf16: dict[str, Any], folder: str = "", gas: int = 1, **config: Any
) -> Any:
    offload = zero.get("offload_optimizer", {})
    if offload.get("device") == "nvme":
        zero = {**zero, "offload_optimizer": {**offload, "nvme_path": folder}}
    sections = {
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}},
        "bf16": {"enabled": True, **bf16},
        "zero_optimization": {**SMALL, **zero},
        **config,
    }
    return start(net(), micro=4, gas=gas, **sections)


def go(engine: Any, steps: range, gas: int = 1) -> None:
    from ds_core import comm

    for step in steps:
        for part in range(gas):
            engine.backward(
                engine(batch(step * gas + part, comm.rank(), torch.bfloat16))
                .float()
                .square()
                .mean()
            )
            engine.step()


def errors(engine: Any, wanted: dict[str, Tensor]) -> dict[str, float]:
    from ds_testing.truth import relative, whole_weights

    found = whole_weights(engine)
    return {n: relative(found[n].float(), w.float()) for n, w in wanted.items()}


def errors_of_cases(
    folder: str, cases: list[dict[str, Any]], steps: int, gas: int
) -> list[tuple[str, float]]:
    """(what, largest error) of each case, and of one that goes on from a checkpoint in the
    middle."""
    from ds_core import comm

    rows = []
    for bf16 in (NARROW, NARROW | STATES):
        wanted = alone(steps, comm.world_size(), bf16 is NARROW, gas)
        for number, case in enumerate(cases):
            engine = engine_of(case, bf16, folder, gas)
            assert engine.ctx.precision.master is None
            go(engine, range(steps // 2), gas)
            path = f"{folder}/{number}{len(bf16)}"
            engine.save_checkpoint(path, tag="half")
            engine.destroy()
            engine = engine_of(case, bf16, folder, gas)
            engine.load_checkpoint(path, tag="half")
            go(engine, range(steps // 2, steps), gas)
            masters = [p for g in engine.optimizer.param_groups for p in g["params"]]
            assert {p.dtype for p in masters} == {torch.bfloat16}
            moments = {
                v.dtype
                for s in engine.optimizer.state.values()
                for k, v in s.items()
                if k != "step"
            }
            assert moments == {torch.float32 if bf16 is NARROW else torch.bfloat16}
            rows.append((f"{case} {bf16}", max(errors(engine, wanted).values())))
            engine.destroy()
    return rows


def test_one_rank_updates_bf16_weights_as_the_optimizer_alone(tmp_path: Path) -> None:
    rows = errors_of_cases(str(tmp_path), CASES, 8, 1)
    assert len(rows) == 2 * len(CASES) and [row for row in rows if row[1] > 0] == []


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_do_what_one_does(world: int, tmp_path: Path) -> None:
    """The order in which bf16 gradients are summed shows from the third rank on."""
    cases = CASES if world == 4 else [CASES[0], CASES[2], CASES[4]]
    for rows in run_ranks(world, errors_of_cases, str(tmp_path), cases, 6, 1):
        assert [row for row in rows if not row[1] <= (0 if world == 2 else 0.02)] == []


@pytest.mark.slow
def test_accumulation_sums_in_bf16(tmp_path: Path) -> None:
    for rows in run_ranks(
        2, errors_of_cases, str(tmp_path), [{"stage": 0}, {"stage": 2}, {"stage": 3, **CPU}], 6, 2
    ):
        assert [row for row in rows if not row[1] <= 0.02] == []


def test_a_checkpoint_with_masters_goes_on_without(tmp_path: Path) -> None:
    engine = engine_of({"stage": 2}, {})
    go(engine, range(4))
    weights = {n: p.detach().clone() for n, p in engine.module.named_parameters()}
    engine.save_checkpoint(str(tmp_path), tag="four")
    engine.destroy()
    for stage in (0, 3):
        engine = engine_of({"stage": stage}, NARROW | STATES)
        engine.load_checkpoint(str(tmp_path), tag="four")
        assert max(errors(engine, weights).values()) == 0
        go(engine, range(4, 6))
        engine.destroy()


def test_fp16_updates_its_weights() -> None:
    losses = []
    for narrow in (False, True):
        fp16 = {"enabled": True, "loss_scale": 128, "fp16_master_weights_and_grads": narrow}
        engine = engine_of({"stage": 1, **CPU}, {"enabled": False}, fp16=fp16)
        for _ in range(20):
            loss = engine(batch(0, 0, torch.float16)).float().square().mean()
            engine.backward(loss)
            engine.step()
        updated = {p.dtype for g in engine.optimizer.param_groups for p in g["params"]}
        assert updated == {torch.float16 if narrow else torch.float32}
        losses.append(loss.item())
        engine.destroy()
    assert losses[1] == pytest.approx(losses[0], rel=0.05) and losses[1] < 0.05


def test_what_does_not_go_together_is_an_error() -> None:
    with pytest.raises(
        ConfigError, match=r"bf16_optimizer_states: needs bf16_master_weights_and_grads"
    ):
        engine_of({"stage": 1}, STATES)
    with pytest.raises(
        ConfigError, match=r"bf16.bf16_optimizer_states: 'lamb' keeps its states in fp32"
    ):
        engine_of({"stage": 1}, NARROW | STATES, optimizer={"type": "Lamb"})


@pytest.mark.parametrize(("bf16", "states"), [({}, 8), (NARROW, 8), (NARROW | STATES, 4)])
def test_the_plan_counts_them(bf16: dict[str, Any], states: int) -> None:
    from ds_zero.planning.planner import memory

    config = {
        "train_batch_size": 1,
        "bf16": {"enabled": True, **bf16},
        "optimizer": {"type": "AdamW"},
    }
    from ds_core.setup.compose import compose

    chosen = compose({**config, "zero_optimization": {"stage": 1}})
    section: Any = chosen.config.section("zero_optimization")
    model = net(torch.bfloat16)
    count = sum(p.numel() for p in model.parameters())
    need = memory(chosen.config, chosen.plugins, section, model, 1)
    masters = 0 if bf16 else 4
    assert need["device"] == pytest.approx(count * (2 + 2 + masters + states), rel=0.05)
