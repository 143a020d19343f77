"""The 1-bit family: the exchange, the rules of warm-up and freezing, several ranks against a
simulation of them.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import ds_optimizers
import papers
import pytest
import torch
from ds_optimizers.onebit.compress import (
    Errors,
    compressed_allreduce,
    pack_signs,
    padded,
    unpack_signs,
)
from ds_testing import Traffic, run_ranks
from ds_testing.truth import difference, start, train
from torch import Tensor, nn

# -- the exchange ----------------------------------------------------------------------------------


def test_golden_values_of_the_compression() -> None:
    """api.md, section 27."""
    values = torch.tensor([1, -2, 3, -4, 0, 0.5, -0.5, 2])
    errors = Errors.of(values, 1)
    found = compressed_allreduce(values, errors)
    assert found.abs().tolist() == pytest.approx([2.0767] * 8, abs=5e-5)
    assert found.sign().tolist() == [1, -1, 1, -1, 1, 1, -1, 1]  # 0 counts as +
    told = [-1.0767, 0.0767, 0.9233, -1.9233, -2.0767, -1.5767, 1.5767, -0.0767]
    assert errors.worker[0].tolist() == pytest.approx(told, abs=5e-5)


def test_signs_are_packed_eight_to_a_byte() -> None:
    values = torch.tensor([1.0, -1, 0, -0.0, 5, -5, -5, 5, *[-1.0] * 7, 1])
    packed = pack_signs(values)
    assert packed.dtype == torch.uint8 and packed.tolist() == [0b10111001, 1]
    assert unpack_signs(packed, torch.float32).tolist() == [1.0 if v >= 0 else -1.0 for v in values]
    wide = torch.randn(3, 5, 64)
    assert torch.equal(
        unpack_signs(pack_signs(wide), wide.dtype), torch.where(wide >= 0, 1.0, -1.0)
    )


def test_padding_makes_whole_bytes_for_every_rank() -> None:
    for ranks in (1, 2, 3, 4, 6, 8, 12):
        for numel in (0, 1, 7, 64, 1000):
            size = padded(numel, ranks)
            assert size >= numel and size % (8 * ranks) == 0
            assert size % (ranks * (8 * ranks // math.gcd(ranks, 8))) == 0
    assert (padded(1, 2), padded(17, 2), padded(1, 3)) == (16, 32, 72)


SHAPES = ((5,), (40, 3), (1,), (64,), (0,))


def inputs(rank: int, turn: int) -> list[Tensor]:
    make = torch.Generator().manual_seed(100 * turn + rank)
    return [torch.randn(s, generator=make, dtype=torch.float64) for s in SHAPES]


def exchange(turns: int) -> dict[str, Any]:
    from ds_optimizers.onebit.compress import Exchange

    from ds_core import comm

    link = Exchange()
    ranks = comm.world_size()
    errors = [Errors.of(t, ranks) for t in inputs(0, 0)]
    wire = papers.Wire()
    worst = 0.0
    for turn in range(turns):
        mine = inputs(comm.rank(), turn)
        link.average(mine, errors)
        every = [inputs(rank, turn) for rank in range(ranks)]
        for i, found in enumerate(mine[:-1]):
            expected = wire(i, [e[i] for e in every])
            worst = max(worst, float((found - expected).abs().max()))
    return {"worst": worst, "sent": link.sent, "full": link.full}


@pytest.mark.parametrize("world", [2, 3])
def test_many_tensors_in_one_message_are_each_compressed_alone(world: int) -> None:
    bits = sum(padded(math.prod(s), world) for s in SHAPES) // 8
    scales = 8 * len(SHAPES)  # fp64 here
    for found in run_ranks(world, exchange, 5):
        assert found["worst"] <= 1e-12
        assert found["sent"] == 5 * ((bits // world + scales) * (world - 1) * 2)
        assert found["full"] == 5 * (
            2 * 8 * sum(math.prod(s) for s in SHAPES) * (world - 1) // world
        )


# -- training on several ranks ---------------------------------------------------------------------

WORLD = 2
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "OneBitAdam": ({"lr": 2e-3, "freeze_step": 8, "weight_decay": 0.1}, {"freeze_step": 8}),
    "OneBitLamb": ({"lr": 2e-3, "freeze_step": 8, "weight_decay": 0.1}, {"freeze_step": 8}),
    "ZeroOneAdam": (
        {
            "lr": 2e-3,
            "weight_decay": 0.1,
            "var_freeze_step": 12,
            "var_update_scaler": 3,
            "local_step_scaler": 6,
            "local_step_clipper": 4,
        },
        {"freeze": 12, "every": 3, "steps": 6, "most": 4},
    ),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 11)
        self.last = nn.Linear(11, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return (self.last(torch.tanh(self.first(x))) - x[:, :3]).square().mean()


def net() -> Net:
    torch.manual_seed(5)
    return Net().double()


def batch(step: int, rank: int) -> Tensor:
    make = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(4, 6, generator=make, dtype=torch.float64)


def gradient(rank: int, step: int, weights: list[Tensor], gas: int = 1) -> list[Tensor]:
    model = net()
    for param, weight in zip(model.parameters(), weights, strict=True):
        param.data.copy_(weight)
    for micro in range(gas):
        (model(batch(gas * step + micro, rank)) / gas).backward()
    return [p.grad for p in model.parameters()]  # type: ignore[misc]


def engine_of(kind: str, gas: int = 1, **config: Any) -> Any:
    optimizer = {"type": kind, "params": KINDS[kind][0]}
    plugins = {"load": ["ds_optimizers.plugin"]}
    return start(net(), micro=4, gas=gas, optimizer=optimizer, **{"plugins": plugins, **config})


def go(engine: Any, steps: range, plain: bool = False) -> None:
    gas = engine.gradient_accumulation_steps()
    train(engine, lambda step, n: batch(gas * step + n // WORLD, n % WORLD), steps, direct=plain)


def error(engine: Any, simulated: papers.Ranks) -> float:
    from ds_core import comm

    return difference(list(engine.module.parameters()), simulated.p[comm.rank()])


def against_simulation(kind: str, steps: int, clip: float, gas: int, plain: bool) -> float:
    params, rules = KINDS[kind]
    engine = engine_of(kind, gas, gradient_clipping=clip)
    go(engine, range(steps), plain)
    fixed = {
        "lr": params["lr"],
        "wd": params["weight_decay"],
        **rules,
        **({"clip": clip} if clip else {}),
    }
    weights = [p.detach() for p in net().parameters()]
    simulated = getattr(papers, kind)(weights, WORLD, lambda r, s, w: gradient(r, s, w, gas))
    for step in range(steps):
        simulated.step(step, **fixed)
    worst = error(engine, simulated)
    engine.destroy()
    return worst


@pytest.mark.fast_cases(
    "OneBitLamb-0.0-2-True", "OneBitAdam-0.3-2-False", "ZeroOneAdam-0.0-1-False"
)
@pytest.mark.parametrize(
    ("kind", "clip", "gas", "plain"),
    [
        ("OneBitAdam", 0.0, 1, False),
        ("OneBitAdam", 0.3, 2, False),
        ("OneBitLamb", 0.0, 1, False),
        ("OneBitLamb", 0.0, 2, True),
        ("ZeroOneAdam", 0.0, 1, False),
        ("ZeroOneAdam", 0.0, 2, True),
    ],
)
def test_two_ranks_do_what_the_documents_say(kind: str, clip: float, gas: int, plain: bool) -> None:
    """Through warm-up, freezing and, for 0/1 Adam, every kind of step; 100 steps."""
    for worst in run_ranks(WORLD, against_simulation, kind, 100, clip, gas, plain):
        assert worst <= 1e-9


def resumed(kind: str, folder: str, at: int, steps: int) -> dict[str, Any]:
    """Saving and going on; loading elsewhere and going on; and what a simulation says of both."""
    params, rules = KINDS[kind]
    straight = engine_of(kind)
    go(straight, range(at))
    straight.save_checkpoint(folder, tag="here")
    go(straight, range(at, steps))
    engine = engine_of(kind)
    engine.load_checkpoint(folder, tag="here")
    go(engine, range(at, steps))
    weights = [p.detach() for p in net().parameters()]
    simulated = getattr(papers, kind)(weights, WORLD, gradient)
    for step in range(steps):
        if step == at and kind == "ZeroOneAdam" and simulated.rates:
            simulated.bring(exact=True)
        simulated.step(step, lr=params["lr"], wd=params["weight_decay"], **rules)
    pairs = zip(engine.module.parameters(), straight.module.parameters(), strict=True)
    found = {
        "worst": error(engine, simulated),
        "averages": engine.partitioner.averages,
        "same": all(torch.equal(a, b) for a, b in pairs),
    }
    straight.destroy()
    engine.destroy()
    return found


@pytest.mark.fast_cases("ZeroOneAdam-35")
@pytest.mark.parametrize(
    ("kind", "at"),
    [
        ("OneBitAdam", 5),
        pytest.param("OneBitAdam", 20, marks=pytest.mark.slow),
        ("OneBitLamb", 20),
        pytest.param("ZeroOneAdam", 7, marks=pytest.mark.slow),
        pytest.param("ZeroOneAdam", 30, marks=pytest.mark.slow),
        ("ZeroOneAdam", 35),
    ],
)
def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(
    kind: str, at: int, tmp_path: Path
) -> None:
    for found in run_ranks(WORLD, resumed, kind, str(tmp_path), at, 50):
        assert found["worst"] <= 1e-9
        assert found["same"]
        assert not found["averages"]


def saved_by_two(kind: str, folder: str) -> None:
    engine = engine_of(kind)
    go(engine, range(20))
    engine.save_checkpoint(folder, tag="here")
    engine.destroy()


def loaded_by_four(kind: str, folder: str) -> tuple[int, float]:
    engine = engine_of(kind)
    engine.load_checkpoint(folder, tag="here")
    kept = len(engine.optimizer.rank_state_dict())
    go(engine, range(20, 25))
    worst = max(float(p.detach().abs().max()) for p in engine.module.parameters())
    engine.destroy()
    return kept, worst


@pytest.mark.fast_cases("OneBitLamb")
@pytest.mark.parametrize("kind", ["OneBitAdam", "OneBitLamb"])
def test_more_ranks_begin_without_errors(kind: str, tmp_path: Path) -> None:
    run_ranks(2, saved_by_two, kind, str(tmp_path))
    for kept, worst in run_ranks(4, loaded_by_four, kind, str(tmp_path)):
        assert kept == 0
        assert worst < 10


def converges(kind: str) -> dict[str, float]:
    """Least squares in fp32: how far the loss falls, and what travelled for it."""
    import ds_core
    from ds_core import comm

    torch.manual_seed(0)
    target = torch.randn(40, 40) / 5
    model = nn.Linear(40, 40, bias=False)
    speed = {"OneBitAdam": 3e-3, "ZeroOneAdam": 3e-3, "OneBitLamb": 3e-2}[kind]
    warm = (
        {"var_freeze_step": 100, "local_step_scaler": 60}
        if kind == "ZeroOneAdam"
        else {"freeze_step": 60}
    )
    engine, *_ = ds_core.initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": 32,
            "optimizer": {"type": kind, "params": {"lr": speed, **warm}},
            "scheduler": {"type": "CosineAnnealingLR", "params": {"T_max": 400}},
            "plugins": {"load": ["ds_optimizers.plugin"]},
        },
    )
    make = torch.Generator().manual_seed(comm.rank())
    losses = []
    comm.add_interceptor(traffic := Traffic())
    for _ in range(400):
        x = torch.randn(32, 40, generator=make)
        loss = (engine(x) - x @ target).square().mean()
        losses.append(float(loss.detach()))
        engine.backward(loss)
        engine.step()
    comm.remove_interceptor(traffic)
    rows = [r for r in traffic.sent if r.op in ("all_to_all_single", "all_gather_into_tensor")]
    optimizer = engine.optimizer
    told = {"sent": optimizer.bytes_sent, "full": optimizer.bytes_uncompressed}
    logged = sum(r.bytes for r in rows) // 2  # half of each message stays here
    engine.destroy()
    return {"first": losses[0], "last": sum(losses[-10:]) / 10, "logged": logged, **told}


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        "OneBitLamb",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS if kind != "OneBitLamb"),
    ],
)
def test_it_converges_on_a_thirtieth_of_the_bytes(kind: str) -> None:
    for found in run_ranks(WORLD, converges, kind):
        assert found["last"] < 0.02 * found["first"]
        assert 0 < found["sent"] < found["full"] / 25
        assert found["logged"] == found["sent"]


# -- rules -----------------------------------------------------------------------------------------


def parameters(*shapes: tuple[int, ...]) -> list[nn.Parameter]:
    make = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(s, generator=make)) for s in shapes]


def test_the_first_step_of_1bit_adam_counts_but_changes_nothing() -> None:
    (param,) = parameters((4,))
    before = param.detach().clone()
    optimizer = ds_optimizers.OneBitAdam([param], freeze_step=3)
    averages = []
    for turn in range(5):
        param.grad = torch.ones(4)
        averages.append(optimizer.takes_averages)
        optimizer.step()
        assert torch.equal(param, before) is (turn == 0)
    assert averages == [True, True, True, False, False]
    assert float(optimizer.state[param]["step"]) == 5


def test_the_variance_is_frozen_but_not_in_groups_that_are_not() -> None:
    a, b = parameters((4,), (4,))
    optimizer = ds_optimizers.OneBitAdam(
        [{"params": [a]}, {"params": [b], "non_freeze": True}], freeze_step=2
    )
    seen = []
    for turn in range(4):
        for param in (a, b):
            param.grad = torch.full((4,), float(turn + 1))
        optimizer.step()
        seen.append([float(optimizer.state[p]["exp_avg_sq"][0]) for p in (a, b)])
    assert seen[1][0] == seen[2][0] == seen[3][0] > 0
    assert seen[1][1] < seen[2][1] < seen[3][1]


def test_when_0_1_adam_wants_averages() -> None:
    (param,) = parameters((4,))
    optimizer = ds_optimizers.ZeroOneAdam([param], var_freeze_step=12, var_update_scaler=2)
    wanted = []
    for _ in range(16):
        wanted.append(optimizer.takes_averages)
        param.grad = torch.ones(4)
        optimizer.step()
    # Steps 1, 2 at interval 1; 4, 6 at interval 2; 8, 12 at interval 4; frozen from step 14 on.
    assert [i + 1 for i, w in enumerate(wanted) if w] == [1, 2, 4, 6, 8, 12]


def masked() -> dict[str, Any]:
    """Rows of an embedding that nobody uses, and elements that the user masks."""
    from ds_core import comm

    table = nn.Parameter(torch.ones(6, 4))
    given = nn.Parameter(torch.ones(5))
    late = nn.Parameter(torch.ones(3))
    mask = torch.tensor([1.0, 1, 0, 1, 1])
    optimizer = ds_optimizers.OneBitAdam(
        [{"params": [table]}, {"params": [given], "exp_avg_mask": mask}, {"params": [late]}],
        lr=1e-3,
        freeze_step=4,
    )
    late_before = late.detach().clone()
    for turn in range(12):
        make = torch.Generator().manual_seed(10 * turn + comm.rank())
        table.grad = torch.randn(6, 4, generator=make)
        table.grad[3:] = 0
        given.grad = torch.randn(5, generator=make)
        late.grad = None
        if comm.rank() == 0 and turn > 6:
            table.grad = None  # only this rank lacks it
        if turn == 4:
            at_freeze = given.detach().clone()
            optimizer.state[given]["exp_avg"].mul_(mask)
        optimizer.step()
    return {
        "table": table.detach(),
        "still": bool((given.detach() == at_freeze)[2]),
        "moved": bool((given.detach() != at_freeze)[[0, 1, 3, 4]].all()),
        "late": bool(torch.equal(late, late_before)),
        "json": "exp_avg_mask" not in optimizer.param_groups[1],
    }


def test_what_has_no_variance_or_is_masked_stays_where_it_is() -> None:
    a, b = run_ranks(WORLD, masked)
    assert torch.equal(a["table"], b["table"])
    assert torch.equal(a["table"][3:], torch.ones(3, 4))
    assert bool(((a["table"][:3] - 1).abs() > 1e-3).all()) and bool(
        ((a["table"][:3] - 1).abs() < 1).all()
    )
    for found in (a, b):
        assert found["still"] and found["moved"] and found["late"] and found["json"]


def test_masks_must_fit() -> None:
    with pytest.raises(ValueError, match=r"exp_avg_mask has shape \(3,\), its parameter \(4,\)"):
        ds_optimizers.OneBitAdam([{"params": parameters((4,)), "exp_avg_mask": torch.ones(3)}])


def test_a_rate_of_zero_between_exchanges_breaks_nothing() -> None:
    (param,) = parameters((4,))
    optimizer = ds_optimizers.ZeroOneAdam([param], var_freeze_step=2)
    for turn in range(6):
        optimizer.param_groups[0]["lr"] = 0.0 if turn > 3 else 1e-3
        param.grad = torch.ones(4)
        optimizer.step()
    assert bool(param.isfinite().all()) and bool(optimizer.state[param]["exp_avg"].isfinite().all())


def overflow() -> dict[str, Any]:
    """fp16, frozen: one rank's own gradient overflows."""
    import ds_core
    from ds_core import comm

    torch.manual_seed(0)
    engine, *_ = ds_core.initialize(
        model=nn.Linear(4, 2),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "fp16": {"enabled": True, "initial_scale_power": 4, "hysteresis": 1},
            "optimizer": {"type": "OneBitLamb", "params": {"freeze_step": 2}},
            "plugins": {"load": ["ds_optimizers.plugin"]},
        },
    )
    for step in range(6):
        x = torch.ones(2, 4, dtype=torch.float16) * (
            float("inf") if step == 4 and comm.rank() == 1 else 1
        )
        engine.backward(engine(x).float().square().mean())
        engine.step()
    weights = torch.cat([p.detach().float().reshape(-1) for p in engine.module.parameters()])
    result = {"skipped": engine.skipped_steps, "scale": engine.loss_scale, "weights": weights}
    engine.destroy()
    return result


def test_an_overflow_on_one_rank_skips_the_step_on_all() -> None:
    a, b = run_ranks(WORLD, overflow)
    assert torch.equal(a["weights"], b["weights"]) and bool(a["weights"].isfinite().all())
    assert [(f["skipped"], f["scale"]) for f in (a, b)] == [(1, 8.0)] * 2
