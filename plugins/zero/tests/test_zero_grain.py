"""Optimizers that need whole tensors (LAMB, Muon, anybody's) do under every stage what they do in
one process.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
import torch
from ds_testing import Traffic, run_ranks
from ds_testing.kits.train.partitioner import CASES, PartitionerConformance
from ds_zero.buckets.full_tensors import choose_owners
from ds_zero.buckets.layout import Layout
from torch import Tensor, nn

from plugins.zero.tests.grain_models import (
    DTYPES,
    GLOBAL,
    LOAD,
    MAKERS,
    PLUGIN,
    SMALL,
    data,
    grained,
    groups_of,
    net,
    steps,
    whole,
)

# -- the kit, with an element-wise optimizer that claims to need whole tensors ---------------------


class _Whole(PartitionerConformance):
    load: ClassVar[tuple[str, ...]] = (PLUGIN,)
    # of what is cut along tp or ep, or is on one pipeline stage
    refused = "needs each tensor whole"
    stage: ClassVar[int]

    @pytest.mark.parametrize("world", [1, 2, 4])
    @pytest.mark.parametrize("how", ["manual"])
    @pytest.mark.parametrize("name", list(CASES))
    def test_trains_as_one_process(self, name: str, how: str, world: int) -> None:
        leaf = (
            {"leaf_module": {"classes": "_Net"}}
            if name == "partly-used" and self.stage == 3
            else {}
        )
        self.config = {"zero_optimization": {"stage": self.stage, **SMALL, **leaf}}  # type: ignore[misc]
        super().test_trains_as_one_process(name, how, world)


@pytest.mark.slow
class TestWhole1(_Whole):
    stage = 1
    config: ClassVar[Mapping[str, Any]] = {"zero_optimization": {"stage": 1, **SMALL}}


@pytest.mark.slow
class TestWhole2(_Whole):
    stage = 2
    config: ClassVar[Mapping[str, Any]] = {
        "zero_optimization": {"stage": 2, "overlap_comm": True, **SMALL}
    }


@pytest.mark.slow
class TestWhole3(_Whole):
    stage = 3
    config: ClassVar[Mapping[str, Any]] = {"zero_optimization": {"stage": 3, **SMALL}}


del _Whole  # not to be collected by itself


# -- LAMB and Muon against one process -------------------------------------------------------------


def truth(
    kind: str, dtype: str, clip: float, steps: int = 4
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights of one process of plain torch; 16-bit weights have fp32 masters."""
    model = net(dtype)
    low = dtype in ("bfloat16", "float16")
    masters = {
        p: nn.Parameter(p.detach().clone(), p.requires_grad) if low else p
        for p in model.parameters()
    }
    model.to(getattr(torch, dtype))
    for param, master in masters.items():
        if low:
            master.data.copy_(param)
    made = [{**g, "params": [masters[p] for p in g["params"]]} for g in groups_of(model, kind)]
    trained = [p for g in made for p in g["params"]]
    optimizer = MAKERS[kind](made)
    scale = 8.0 if dtype == "float16" else 1.0
    losses = []
    for step in range(steps):
        losses.append(0.0)
        for index in range(GLOBAL):
            loss = model(data(dtype, step, index))
            (loss * scale / GLOBAL).backward()
            losses[-1] += loss.item() / GLOBAL
            for param, master in masters.items():
                if low and param.grad is not None:  # summed in fp32, in any order nearly the same
                    master.grad = param.grad.float() / scale + (
                        0 if master.grad is None else master.grad
                    )
                    param.grad = None
        if clip:
            torch.nn.utils.clip_grad_norm_([p for p in trained if p.grad is not None], clip)
        optimizer.step()
        model.zero_grad()
        optimizer.zero_grad()
        with torch.no_grad():
            for param, master in masters.items():
                param.copy_(master)
    return losses, {n: p.detach().clone() for n, p in model.named_parameters()}


def errors_of(kind: str, dtype: str, clip: float, stage: int) -> dict[str, float]:
    from ds_testing.truth import relative

    from ds_core import comm

    expected, weights = truth(kind, dtype, clip)
    engine = grained(kind, dtype, stage, seed=comm.rank(), gradient_clipping=clip)
    losses = steps(engine, dtype, range(4))
    found = whole(engine)
    held = {n for p in engine.partitioner.fragments.values() if p.stop > p.start for n in [p.name]}
    errors = {"loss": max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))}
    for name, weight in weights.items():
        errors[name] = relative(found[name], weight)
    unused = [
        p
        for p in engine.partitioner.fragments.values()
        if p.name.startswith("unused") and p.master.grad is None
    ]
    assert not any(engine.optimizer.state.get(p.master) for p in unused)
    start_weights = dict(net(dtype).named_parameters())
    assert torch.equal(
        found["unused.weight"].float(),
        start_weights["unused.weight"].to(getattr(torch, dtype)).float(),
    )
    owners = comm.all_gather_json(sorted(held))
    engine.destroy()
    flat = [n for names in owners for n in names]
    errors["owned twice"] = float(len(flat) - len(set(flat)))
    return errors


@pytest.mark.fast_cases(
    "lamb-float64-0.0-3-1",
    "lamb-float64-0.05-1-2",
    "lamb-float32-0.05-3-1",
    "lamb-bfloat16-0.05-3-2",
    "lamb-float16-0.0-1-2",
    "muon-float64-0.0-1-1",
    "muon-float64-0.05-3-2",
    "muon-float32-0.0-1-2",
    "muon-float64-0.05-1-1",
)
@pytest.mark.parametrize("world", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize(
    ("kind", "dtype", "clip"),
    [
        ("lamb", "float64", 0.0),
        ("lamb", "float64", 0.05),
        ("lamb", "float32", 0.05),
        ("lamb", "bfloat16", 0.05),
        ("lamb", "float16", 0.0),
        ("muon", "float64", 0.0),
        ("muon", "float64", 0.05),
        ("muon", "float32", 0.0),
        ("muon", "bfloat16", 0.0),
    ],
)
def test_trains_as_one_process(kind: str, dtype: str, clip: float, stage: int, world: int) -> None:
    for rank, errors in enumerate(run_ranks(world, errors_of, kind, dtype, clip, stage)):
        for what, error in errors.items():
            assert error <= DTYPES[dtype], f"rank {rank}: {what} is off by {error:.3g}"


# -- who owns what, and what is sent ---------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2, 3, 8, 4096])
def test_owners_are_balanced(world: int) -> None:
    dice = random.Random(world)
    for tensors in (1, 5, 60):
        sizes = []
        homes = []
        for _ in range(20):  # buckets
            layout = Layout.of(
                [dice.choice([0, 1, 3, 40, 1000, 1024, 50000]) for _ in range(tensors)], world
            )
            for index, size in enumerate(layout.sizes):
                ranks = layout.ranks(index)
                assert [
                    r
                    for r in range(world)
                    if layout.span(index, r).stop > layout.span(index, r).start
                ] == [*ranks], "Layout.ranks disagrees with its spans"
                sizes.append(size)
                homes.append(ranks[0] if len(ranks) == 1 else None)
            if world == 4096:
                break
        owners = choose_owners(sizes, homes, world)
        loads = [0] * world
        for size, owner in zip(sizes, owners, strict=True):
            loads[owner] += size
        assert max(loads) <= sum(sizes) / world + max(sizes)
        assert owners == choose_owners(sizes, homes, world)
        stay = sum(o == h for o, h in zip(owners, homes, strict=True) if h is not None)
        assert stay >= 0.9 * sum(h is not None for h in homes)


def test_owners_by_hand() -> None:
    assert choose_owners([6, 4, 2], [None, None, None], 2) == [0, 1, 1]
    assert choose_owners([4, 4, 4], [0, None, 1], 3) == [0, 2, 1]
    # A home without room gives its tensor away.
    assert choose_owners([4, 4, 4, 4], [0, 0, 0, 0], 2) == [0, 0, 0, 1]
    assert choose_owners([], [], 2) == []


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.b = nn.Linear(8, 8)
        self.c = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x))))).square().mean()


def traffic(stage: int, dtype: str, bucket: int) -> dict[str, Any]:
    import ds_core
    from ds_core import comm

    comm.add_interceptor(traffic := Traffic())
    engine, *_ = ds_core.initialize(
        model=Rows(),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "PaperLamb"},
            "bf16": {"enabled": dtype == "bfloat16"},
            "zero_optimization": {
                "stage": stage,
                "param_persistence_threshold": 0,
                "reduce_bucket_size": bucket,
            },
            **LOAD,
        },
    )
    for _ in range(2):
        traffic.sent.clear()
        engine.backward(engine(torch.randn(2, 8, dtype=getattr(torch, dtype))))
        engine.step()
    comm.remove_interceptor(traffic)
    rows = [r for r in traffic.sent if r.op == "all_to_all_single"]
    sent = sum(r.bytes for r in rows)
    calls = len(rows)
    masters = sum(p.master.numel() for p in engine.partitioner.fragments.values())
    extra = sum(
        p.master.numel()
        for b in engine.partitioner.buckets
        for p in b.masters.fragments
        if p.master.untyped_storage().data_ptr()
        not in (b.weights.shard.untyped_storage().data_ptr(), b.full.untyped_storage().data_ptr())
    )
    engine.destroy()
    return {"sent": sent, "calls": calls, "masters": masters, "extra": extra}


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2)])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_only_cut_tensors_travel(stage: int, dtype: str, size: int) -> None:
    """Of three layers of 64 + 8 elements over 2 ranks, only what the parts' border cuts is sent, in
    16 bits if so.
    """
    found = run_ranks(2, traffic, stage, dtype, 10_000)
    assert sum(f["masters"] for f in found) == 3 * 72
    # a bucket per layer: its weight is cut at 36 of 72, its owner sends all of it back
    if stage == 3:
        cut = 3 * 64
        calls = 6
    else:  # one bucket of bias and weight, last layer first: the border at 108 lies in b's weight
        cut = 64
        calls = 2
    assert [f["calls"] for f in found] == [calls, calls]
    # Together: gradients of each cut tensor once, its weight once.
    assert sum(f["sent"] for f in found) == 2 * cut * size
    # fp32 masters are memory of their own only where the weight is not whole on its owner.
    assert sum(f["extra"] for f in found) == (
        216 if dtype == "bfloat16" else cut if stage == 3 else 0
    )


def test_one_rank_sends_nothing() -> None:
    for stage in (1, 2, 3):
        (found,) = run_ranks(1, traffic, stage, "float32", 100)
        assert found == {"sent": 0, "calls": 0, "masters": 216, "extra": 0}


# -- who needs full tensors ------------------------------------------------------------------------


def grains() -> dict[str, str | None]:
    import ds_core
    from plugins.zero.tests.whole_tensors import Adam, PaperLamb, Unknown

    found: dict[str, str | None] = {}
    for name, optimizer in {
        "Muon class": torch.optim.Muon,
        "Adafactor object": torch.optim.Adafactor(nn.Linear(2, 2).parameters()),
        "RMSprop object": torch.optim.RMSprop(nn.Linear(2, 2).parameters()),
        "mine": Unknown,
        "my Adam": Adam,
        "function": lambda groups: torch.optim.SGD(groups, lr=0.1),
        "PaperLamb class": PaperLamb,
    }.items():
        made = optimizer
        model = nn.Linear(2, 2, bias=False)
        if isinstance(optimizer, torch.optim.Optimizer):
            made = type(optimizer)(model.parameters())
        engine, *_ = ds_core.initialize(
            model=model, optimizer=made, config={"train_batch_size": 1, **LOAD}
        )
        found[name] = engine.ctx.grain
        engine.destroy()
    for name in ("Adafactor", "NAdam"):
        config = {"train_batch_size": 1, "optimizer": {"type": name}}
        engine, *_ = ds_core.initialize(model=nn.Linear(2, 2), config=config)
        found[name] = engine.ctx.grain
        engine.destroy()
    return found


def test_who_needs_what() -> None:
    (found,) = run_ranks(1, grains)
    assert found == {
        "Muon class": "matrix",
        "Adafactor object": "matrix",
        "RMSprop object": "element",
        "mine": None,
        "my Adam": None,
        "function": None,
        "PaperLamb class": "tensor",
        "Adafactor": "matrix",
        "NAdam": "element",
    }
