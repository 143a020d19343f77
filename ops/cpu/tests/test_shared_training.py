"""Collectives through shared memory: between hosts, and training as over gloo."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ds_comm_gloo.two_level import TwoLevel
from ds_ops_cpu import shared as ours
from ds_testing import run_ranks
from ds_testing.kits.parallel.collectives import CHECKS as PROMISES
from torch import nn

from ds_core import comm
from ds_core.comm import collectives
from ds_core.entries import CollectivesEntry

sys.path.insert(0, str(Path(__file__).parent))

from shared_memory import ROOT, core_checks, spread, transport


def inside_hosts(layout: str) -> None:
    spread(layout)
    checks = core_checks("test_two_level", ROOT / "ops" / "comm_gloo" / "tests")
    checks.spread = lambda layout: (spread(layout), comm.open_transport(dist.group.WORLD))  # type: ignore
    checks.several_blocks(layout)
    rank = dist.get_rank()
    size = dist.get_world_size()
    alone = layout.count(layout[rank]) == 1
    assert (
        transport().inside is None if alone else isinstance(transport().inside, ours.SharedMemory)
    )
    lots = [torch.arange(3 * r + rank) + 100 * rank for r in range(size)]
    back = torch.empty(sum(3 * rank + r for r in range(size)), dtype=torch.int64)
    for async_op in (False, True):
        work = comm.all_to_all_single(
            back,
            torch.cat(lots),
            [3 * rank + r for r in range(size)],
            [len(t) for t in lots],
            async_op=async_op,
        )
        assert work is None or work.wait()
        assert torch.equal(
            back, torch.cat([torch.arange(3 * rank + r) + 100 * r for r in range(size)])
        )
    PROMISES["messages"](False)


@pytest.mark.parametrize(
    "layout", ["aabb", *(pytest.param(x, marks=pytest.mark.slow) for x in ("abab", "aaab"))]
)
def test_ranks_of_a_host_share_memory_in_groups_that_span_hosts(layout: str) -> None:
    run_ranks(len(layout), inside_hosts, layout)


def offer(layout: str) -> str:
    """A plugin whose provider ``spread`` takes rank i's host for ``layout[i]``."""
    module: Any = ModuleType("spread_plugin")
    module.serve = spread(layout)
    entry = CollectivesEntry("spread_plugin:serve", device="cpu", backend="gloo", priority=-1)
    module.ds_collectives = lambda: {"spread": entry}
    sys.modules["spread_plugin"] = module
    return "spread_plugin"


def levels() -> bool:
    """Whether a group's collectives go in two levels."""
    used = [known.serving.get("cpu") for known in collectives._groups.values()]
    return any(isinstance(getattr(w, "transport", None), TwoLevel) for w in used)


def losses_by(stage: int, provider: str, dtype: str) -> list[Any]:
    import ds_core

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(40, 300), nn.ReLU(), nn.Linear(300, 40), nn.ReLU(), nn.Linear(40, 7)
    )
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "plugins": {"load": ["ds_zero.plugin", "ds_ops_cpu.plugin", offer("aabb")]},
        "zero_optimization": {
            "stage": stage,
            "param_persistence_threshold": 0,
            "reduce_bucket_size": 4000,
        },
        "collectives": provider,
        "bf16": {"enabled": dtype == "bf16"},
    }
    engine, *_ = ds_core.initialize(model=model, config=config)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(6):
        x = torch.randn(2, 40, generator=generator).to(next(iter(engine.module.parameters())).dtype)
        loss = engine(x).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    used = [known.serving.get("cpu") for known in collectives._groups.values()]
    assert any(isinstance(getattr(w, "transport", None), ours.SharedMemory) for w in used) == (
        provider == "shm"
    )
    assert levels() == (provider == "spread")
    engine.destroy()
    return losses


def train_experts(stage: int, provider: str) -> list[float]:
    moe = core_checks("test_moe_running", ROOT / "plugins" / "moe" / "tests")
    engine = moe.engine_of(2, stage, collectives=provider, plugins={"load": [offer("abab")]})
    losses: list[float] = moe.steps(engine, 0, 4)
    assert levels() == (provider == "spread")
    engine.destroy()
    return losses


@pytest.mark.parametrize(
    ("size", "dtype"), [(2, "fp32"), pytest.param(3, "bf16", marks=pytest.mark.slow)]
)
def test_training_is_that_over_gloo_bit_for_bit(size: int, dtype: str) -> None:
    for stage in (1, 2, 3):
        assert run_ranks(size, losses_by, stage, "shm", dtype) == run_ranks(
            size, losses_by, stage, "composed", dtype
        )


@pytest.mark.slow
def test_training_over_two_hosts_is_that_over_one() -> None:
    for stage in (1, 2, 3):
        ways = [
            run_ranks(4, losses_by, stage, provider, "fp32") for provider in ("spread", "composed")
        ]
        assert all(mine == pytest.approx(flat, rel=1e-5) for mine, flat in zip(*ways, strict=True))
    assert run_ranks(4, train_experts, 1, "spread")[0] == pytest.approx(
        run_ranks(4, train_experts, 1, "composed")[0]
    )
