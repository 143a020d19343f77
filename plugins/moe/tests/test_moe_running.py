"""Runs: checkpoints that move between ep sizes, overflow, monitors, helpers, errors."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))

import moe_models as m
from ds_checkpoint import get_fp32_state_dict_from_zero_checkpoint
from ds_checkpoint.offline import open_saved
from ds_moe import MoE, utils
from ds_testing import run_ranks
from ds_testing.truth import relative, start, whole_weights
from test_moe_conformance import zero

WORLD = 4


def engine_of(ep: int, stage: int = 0, k: int = 2, **config: Any) -> Any:
    adamw = {"type": "AdamW", "params": {"lr": 0.02, "weight_decay": 0.1}}
    sections = {"optimizer": adamw, **zero(stage), **config}
    return start(m.moe_net(ep, k, None), micro=4, clip=0.5, **sections)


def steps(engine: Any, begin: int, end: int) -> list[float]:
    """Losses over all ranks, of the same samples whatever the number of ranks."""
    from ds_core import comm

    dp = engine.ctx.mesh.size("dp")
    index = engine.ctx.mesh.index("dp")
    losses = []
    for step in range(begin, end):
        parts = [
            engine(**m.batch(step, 0, i))
            for i in range(index * WORLD // dp, (index + 1) * WORLD // dp)
        ]
        loss = sum(parts) / len(parts)
        engine.backward(loss)
        engine.step()
        mean = loss.detach().clone()
        comm.all_reduce(mean)
        losses.append(mean.item() / dp)
    return losses


def saves(folder: Path, ep: int, stage: int) -> list[float]:
    engine = engine_of(ep, stage)
    losses = steps(engine, 0, 2)
    engine.save_checkpoint(str(folder), tag="here")
    losses += steps(engine, 2, 4)
    engine.save_checkpoint(str(folder), tag="end", save_latest=False)
    engine.destroy()
    return losses


def goes_on(folder: Path, ep: int, stage: int) -> list[float]:
    engine = engine_of(ep, stage)
    with torch.no_grad():  # what is loaded must not be there before
        if stage < 3:
            for param in engine.module.parameters():
                param.add_(1.0)
    engine.load_checkpoint(str(folder), tag="here")
    losses = steps(engine, 2, 4)
    whole = {n: w.tolist() for n, w in whole_weights(engine).items()}
    engine.destroy()
    return [losses, whole]  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("ep", "stage"),
    [
        pytest.param(4, 0, marks=pytest.mark.slow),
        (4, 3),
        pytest.param(2, 1, marks=pytest.mark.slow),
    ],
)
def test_checkpoints_move_between_ep_sizes(tmp_path: Path, ep: int, stage: int) -> None:
    """Each expert is stored once, under its global number; with another ep, world or stage training
    goes on alike.
    """
    losses = run_ranks(WORLD, saves, tmp_path, ep, stage)[0]
    with open_saved(tmp_path / "here") as saved:
        assert not saved.split  # nothing differs along an axis
        states = [
            s for s in saved.manifest.states if s.name.endswith("first.experts.stacked.0.weight")
        ]
    # The weight, two moments, and one counter of steps.
    assert sorted((s.shape for s in states), key=len) == [(), *[(m.NUM, m.WIDE, m.HIDDEN)] * 3]
    assert all(sum(c.stop - c.start for c in s.chunks) == math.prod(s.shape) for s in states)
    end = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path), tag="end")
    for world, other, to in ((4, 2, 2), (2, 1, 0), (1, 1, 1), (4, 4, 1)):
        for again, whole in run_ranks(world, goes_on, tmp_path, other, to):
            assert again == pytest.approx(losses[2:], rel=1e-10)
            assert set(whole) == set(end)
            # `end` is in fp32
            assert max(relative(torch.tensor(whole[n]), end[n].double()) for n in end) < 1e-6


def overflows(ep: int, stage: int) -> list[Any]:
    from ds_core import comm

    engine = engine_of(
        ep, stage, k=1, fp16={"enabled": True, "initial_scale_power": 8, "hysteresis": 1}
    )
    answers = []
    for step in range(4):
        batch = m.batch(0, 0, 1)
        if step == 1 and comm.rank() == comm.world_size() - 1:
            batch["x"][0] = torch.inf
        engine.backward(engine(**{n: t.half() for n, t in batch.items()}))
        engine.step()
        answers.append([engine.was_step_applied(), engine.loss_scale])
    finite = all(bool(w.isfinite().all()) for w in whole_weights(engine).values())
    engine.destroy()
    return [*answers, finite]


@pytest.mark.fast_cases("2")
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_all_ranks_agree_on_an_overflow(stage: int) -> None:
    for answer in run_ranks(4, overflows, 2, stage):
        assert answer == [[True, 256.0], [False, 128.0], [True, 128.0], [True, 128.0], True]


def monitored(watch: bool) -> Any:
    from ds_core import comm

    told: list[Any] = []

    class Recorder:
        name = "recorder"

        def write_events(self, events: Any) -> None:
            told.extend([e.name, e.value, e.step] for e in events if "/MoE/" in e.name)

        def flush(self) -> None: ...

        def close(self) -> None: ...

    torch.manual_seed(0)
    import ds_core

    model = m.moe_net(2, 1, 0.5)
    engine = ds_core.initialize(model=model, config={"train_micro_batch_size_per_gpu": 4})[0]
    if watch and comm.rank() == 0:
        engine.monitor.monitors.append(Recorder())
    counts = torch.zeros(m.NUM)
    dropped = 0.0
    aux = []
    for step in range(2):
        h = torch.tanh(model.inp(m.batch(step, 0, comm.rank())["x"]))
        with torch.no_grad():
            routing = model.first.gate(h)
        if step == 1:
            counts += routing.counts
            dropped += float(routing.dropped())
            aux.append(float(routing.l_aux))
        engine.backward(engine(**m.batch(step, 0, comm.rank())))
        engine.step()
    kept = model.first.load.watched
    engine.eval()
    engine(**m.batch(0, 0, comm.rank()))
    totals = model.first.load.totals
    engine.destroy()
    return told, counts.tolist(), dropped, aux, kept, totals is None


def test_load_dropped_tokens_and_losses_go_to_monitors() -> None:
    answers = run_ranks(2, monitored, True)
    told = {name: value for name, value, step in answers[0][0] if step == 16}
    counts = [sum(pair) for pair in zip(*(a[1] for a in answers), strict=True)]
    total = sum(counts)
    assert total > 0
    here = {n.removeprefix("Train/MoE/first/"): v for n, v in told.items() if "/first/" in n}
    assert here == pytest.approx(
        {
            **{f"expert_load_{i}": c / total * m.NUM for i, c in enumerate(counts)},
            "load_max": max(counts) / total * m.NUM,
            "dropped": sum(a[2] for a in answers) / total,
            "aux_loss": sum(x for a in answers for x in a[3]) / 2,
        }
    )
    assert here["dropped"] > 0
    assert any("/second/" in n for n in told)
    assert not answers[1][0]  # rank 0 writes
    assert all(a[4] and a[5] for a in answers)
    # nobody listens: nothing is collected
    for told_none, *_, watched, nothing in run_ranks(2, monitored, False):
        assert (told_none, watched, nothing) == ([], False, True)


def with_groups() -> list[Any]:
    """Groups of a script written for DeepSpeed train as parameters do."""
    import ds_core

    answers = []
    for split in (False, True):
        model = m.moe_net(2, 1, None)
        groups: Any = {"params": [*model.parameters()], "name": "all", "weight_decay": 0.2}
        given = (
            utils.split_params_into_different_moe_groups_for_optimizer(groups)
            if split
            else [groups]
        )
        config = {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_clipping": 0.1,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.02}},
            **zero(1),
        }
        engine = ds_core.initialize(model=model, model_parameters=given, config=config)[0]
        losses = steps(engine, 0, 3)
        answers.append([losses, engine.get_global_grad_norm(), len(given)])
        engine.destroy()
    return answers


def test_groups_for_experts_are_accepted() -> None:
    for (losses, norm, one), (again, same, parts) in run_ranks(2, with_groups):
        assert (one, parts) == (1, 3)  # experts over 2 ranks, experts on each, the rest
        assert again == pytest.approx(losses, rel=1e-12)
        assert same == pytest.approx(norm, rel=1e-12)


def test_helpers() -> None:
    model = m.moe_net(1, 1, None)
    shared, experts = utils.split_params_into_shared_and_expert_params(model.parameters())
    assert len(experts) == 8
    assert all(utils.is_moe_param(p) for p in experts)
    assert not any(utils.is_moe_param(p) for p in shared)
    assert {p.group_name for p in experts} == {"ep_size_1"}  # type: ignore[attr-defined]
    assert utils.has_moe_layers(model) == (True, m.NUM)
    assert utils.has_moe_layers(nn.Linear(2, 2)) == (False, 0)
    groups = utils.configure_moe_param_groups(model.parameters())
    assert [utils.is_moe_param_group(g) for g in groups] == [False, True]
    assert sum(len(g["params"]) for g in groups) == len(shared) + 8
    assert utils.configure_moe_param_groups(groups) == groups
    most = max(p.numel() for p in experts)
    parts = utils.split_params_into_different_moe_groups_for_optimizer(
        {"params": experts}, max_group_size=most
    )
    assert all(sum(p.numel() for p in g["params"]) <= most for g in parts)
    assert sum(len(g["params"]) for g in parts) == 8
    plain = [nn.Parameter(torch.ones(2))]
    assert utils.configure_moe_param_groups(plain) == plain


def mixed(config: dict[str, Any]) -> bool:
    """bf16, autocast: trains, and stays near fp32."""
    import ds_core

    losses = []
    for extra in ({}, config):
        model = m.moe_net(2, 2, None).float()
        base = {
            "train_micro_batch_size_per_gpu": 4,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.02}},
        }
        engine = ds_core.initialize(model=model, config={**base, **extra})[0]
        kind = next(model.parameters()).dtype
        rows = []
        for step in range(3):
            batch = {n: t.to(kind) for n, t in m.batch(0, step, 1).items()}
            loss = engine(**batch)
            engine.backward(loss)
            engine.step()
            rows.append(loss.item())
        losses.append(rows)
        engine.destroy()
    return losses[1] == pytest.approx(losses[0], rel=0.1)


@pytest.mark.parametrize(
    "config",
    [{"bf16": {"enabled": True}}, {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}],
)
def test_mixed_precision(config: dict[str, Any]) -> None:
    assert run_ranks(2, mixed, config) == [True, True]


def refused() -> list[str]:
    import ds_core
    from ds_core.errors import DSError

    said = []
    for ep, config in ((2, {"expert_parallel": {"autoep_size": 1}}), (4, {}), ((2, 4), {})):
        sizes = ep if isinstance(ep, tuple) else (ep,)
        model = nn.Sequential(*(MoE(m.HIDDEN, m.expert(), m.NUM, ep_size=size) for size in sizes))
        with pytest.raises(DSError) as caught:
            ds_core.initialize(model=model, config={"train_micro_batch_size_per_gpu": 4, **config})
        said.append(str(caught.value))
    return said


def test_what_does_not_fit_is_refused() -> None:
    for first, second, third in run_ranks(2, refused):
        assert "expert_parallel.autoep_size: is 1, but 0 (MoE) was built for 2; leave" in first
        assert "ep 4 must divide dp 2" in second
        assert "expert_parallel.autoep_size: is 2, but 1 (MoE) was built for 4; leave" in third
