"""Runs: checkpoints that move between ep sizes, overflow, pipelines, monitors, helpers, errors."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))

import moe_models as m
from ds_checkpoint import get_fp32_state_dict_from_zero_checkpoint
from ds_checkpoint.offline import open_saved
from ds_moe import MoE, utils
from ds_testing import RunnerConformance, run_ranks
from ds_testing.kits.train.partitioner import relative, whole_weights
from test_moe_conformance import zero

WORLD = 4


def start(ep: int, stage: int = 0, k: int = 2, **config: Any) -> Any:
    import ds_core

    base = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.02, "weight_decay": 0.1}},
    }
    return ds_core.initialize(model=m.build(ep, k, None), config={**base, **zero(stage), **config})[
        0
    ]


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
    engine = start(ep, stage)
    losses = steps(engine, 0, 2)
    engine.save_checkpoint(str(folder), tag="here")
    losses += steps(engine, 2, 4)
    engine.save_checkpoint(str(folder), tag="end", save_latest=False)
    engine.destroy()
    return losses


def goes_on(folder: Path, ep: int, stage: int) -> list[float]:
    engine = start(ep, stage)
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

    engine = start(
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


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_all_ranks_agree_on_an_overflow(stage: int) -> None:
    for answer in run_ranks(4, overflows, 2, stage):
        assert answer == [[True, 256.0], [False, 128.0], [True, 128.0], [True, 128.0], True]


# -- pipelines -------------------------------------------------------------------------------------


class Stage(nn.Module):
    """A MoE layer with a residual; its auxiliary loss becomes part of the gradient."""

    def __init__(self, ep: int) -> None:
        super().__init__()
        self.moe = MoE(
            m.HIDDEN,
            m.expert(),
            m.NUM,
            ep_size=ep,
            k=2,
            drop_tokens=False,
            top2_2nd_expert_sampling=False,
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.moe(x)[0]


class PlainStage(Stage):
    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.moe = m.PlainMoE(2, None)


def square(out: Tensor, y: Tensor) -> Tensor:
    return (out - y).square().sum() / 10


def piped(ep: int) -> nn.Module:
    from ds_pipeline import PipelineModule

    layers = [nn.Linear(5, m.HIDDEN), Stage(ep), nn.Tanh(), Stage(ep), nn.Linear(m.HIDDEN, 3)]
    return m.fill(
        PipelineModule(layers, num_stages=2, loss_fn=square, partition_method="uniform").double()
    )


def piped_one() -> nn.Module:
    return piped(1)


def piped_two() -> nn.Module:
    return piped(2)


class PlainPiped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = [
            nn.Linear(5, m.HIDDEN),
            PlainStage(),
            nn.Tanh(),
            PlainStage(),
            nn.Linear(m.HIDDEN, 3),
        ]
        self.layers = nn.ModuleDict({str(i): layer for i, layer in enumerate(layers)})

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return square(x, y)


def plain_piped() -> nn.Module:
    return m.fill(PlainPiped().double())


def pair(step: int, micro: int, index: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(1000 * step + 10 * micro + index)
    return (
        torch.randn(3, 5, generator=random, dtype=torch.float64),
        torch.randn(3, 3, generator=random, dtype=torch.float64),
    )


class TestPipelineEp1(RunnerConformance):
    worlds = (2,)
    config = {"expert_parallel": {}}
    variants = {"zero1": zero(1)}
    make_model = staticmethod(piped_one)
    make_truth = staticmethod(plain_piped)
    make_batch = staticmethod(pair)


@pytest.mark.slow
class TestPipelineEp2(RunnerConformance):
    worlds = (4,)
    config = {"expert_parallel": {"autoep_size": 2}}
    variants = {"zero0": {}, "zero1": zero(1), "zero2": zero(2), "zero3": zero(3)}
    make_model = staticmethod(piped_two)
    make_truth = staticmethod(plain_piped)
    make_batch = staticmethod(pair)


# -- the rest --------------------------------------------------------------------------------------


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

    model = m.build(2, 1, 0.5)
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
        model = m.build(2, 1, None)
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
    model = m.build(1, 1, None)
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
        model = m.build(2, 2, None).float()
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


def held(cut: bool) -> list[Any]:
    """The axes of an expert's and the gate's parameters, beside a tp axis."""
    import ds_core

    model = MoE(m.HIDDEN, m.expert(), m.NUM, ep_size=2, enable_expert_tensor_parallelism=cut)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "fake_axes": {"axes": {"tp": 2}},
        "plugins": {"load": ["fake_axes=ds_testing.kits.parallel.fake_axes"]},
    }
    engine = ds_core.initialize(model=model, config=config)[0]
    found = {info.name: list(info.held) for info in engine.ctx.params.values()}
    engine.destroy()
    return [found["experts.stacked.0.weight"], found["gate.wg.weight"]]


def test_experts_that_are_cut_over_tp_differ_over_it() -> None:
    assert run_ranks(4, held, True) == [[["ep", "tp"], []]] * 4
    assert run_ranks(4, held, False) == [[["ep"], []]] * 4


TP = {"plugins": {"load": ["fake_axes=ds_testing.kits.parallel.fake_axes"]}}


class FromAll(torch.autograd.Function):
    """The sum over tensor-parallel ranks, forward; as it is, backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        from ds_core import comm

        x = x.clone()
        comm.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class ToAll(torch.autograd.Function):
    """The other way round."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return FromAll.forward(ctx, grad, ctx.group), None


class CutExpert(nn.Module):
    """A feed-forward network of which tensor-parallel ranks hold columns of the one and rows of the
    other weight.
    """

    mesh: Any = None

    def __init__(self, index: int, size: int) -> None:
        super().__init__()
        torch.manual_seed(7)
        one = torch.randn(12, m.HIDDEN)
        two = torch.randn(m.HIDDEN, 12)
        wide = 12 // size
        self.one = nn.Parameter(one[index * wide : (index + 1) * wide].clone())
        self.two = nn.Parameter(two[:, index * wide : (index + 1) * wide].clone())
        self.bias = nn.Parameter(torch.randn(m.HIDDEN))
        self.one.partition_dim = 0
        self.two.partition_dim = 1
        self.bias.partition_dim = -1

    def forward(self, x: Tensor) -> Tensor:
        group = CutExpert.mesh.group("tp")
        inner = torch.tanh(ToAll.apply(x, group) @ self.one.t())
        return FromAll.apply(inner @ self.two.t(), group) + self.bias


def tensor_parallel(ep: int, tp: int, stage: int, folder: str, first: bool) -> dict[str, Tensor]:
    """Two steps, a checkpoint between them; the rank's whole weights after what it did."""
    import ds_core
    from ds_core import comm

    expert = CutExpert(comm.rank() % tp, tp)
    torch.manual_seed(3)
    layer = MoE(
        m.HIDDEN,
        expert,
        m.NUM,
        ep,
        k=2,
        enable_expert_tensor_parallelism=True,
        drop_tokens=False,
        **m.QUIET,
    )
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.02}},
        "fake_axes": {"axes": {"tp": tp}},
        **TP,
    }
    engine = ds_core.initialize(model=layer.double(), config={**config, **zero(stage)})[0]
    CutExpert.mesh = engine.ctx.mesh
    if not first:
        engine.load_checkpoint(folder)
    dp = engine.ctx.mesh.size("dp")
    index = engine.ctx.mesh.index("dp")
    for _ in range(1):
        torch.manual_seed(50 + engine.global_steps)
        x = torch.randn(16, m.HIDDEN, dtype=torch.float64)[
            index * 16 // dp : (index + 1) * 16 // dp
        ]
        out, _, _ = engine(x)
        engine.backward((out * out).mean())
        engine.step()
    if first:
        engine.save_checkpoint(folder)
    whole = whole_weights(engine)
    engine.destroy()
    return whole


@pytest.mark.parametrize(("ep", "tp", "stage"), [(1, 2, 0), (2, 2, 2)])
def test_checkpoints_of_experts_cut_over_tp_load_at_any_size(
    ep: int, tp: int, stage: int, tmp_path: Path
) -> None:
    truth = run_ranks(1, tensor_parallel, 1, 1, 0, str(tmp_path / "alone"), True)[0]
    after = run_ranks(1, tensor_parallel, 1, 1, 0, str(tmp_path / "alone"), False)[0]
    saved = run_ranks(ep * tp, tensor_parallel, ep, tp, stage, str(tmp_path / "cut"), True)
    runs = [(1, 1, 1, 0), (2, 1, 2, 3), (4, 2, 2, 1), (4, 4, 1, 0)]
    resumed = [
        (w, e, t, run_ranks(w, tensor_parallel, e, t, z, str(tmp_path / "cut"), False))
        for w, e, t, z in runs
    ]
    for what, ranks, right in [("saved", saved, truth), *((r[:3], r[3], after) for r in resumed)]:
        for rank, whole in enumerate(ranks):
            for name, value in right.items():
                assert relative(whole[name], value) < 1e-9, f"{what}, rank {rank}: {name}"


def overlapping() -> tuple[list[str], list[str]]:
    """What happens between rows' departure and arrival, forward and backward."""
    import ds_moe.dispatch as module

    import ds_core

    told: list[str] = []
    layer = MoE(m.HIDDEN, m.expert(), m.NUM, ep_size=2, k=2, use_residual=True, drop_tokens=False)
    begin = module._Exchange.begin
    end = module._Exchange.end

    def noted_begin(self: Any, *arguments: Any) -> Tensor:
        told.append("depart")
        return begin(self, *arguments)

    def noted_end(self: Any) -> Tensor:
        told.append("arrive")
        return end(self)

    engine = ds_core.initialize(model=layer, config={"train_micro_batch_size_per_gpu": 8})[0]
    layer.mlp.register_forward_hook(lambda *_: told.append("dense"))
    layer.experts.register_forward_hook(lambda *_: told.append("experts"))
    layer.mlp.register_full_backward_hook(lambda *_: told.append("dense"))
    layer.experts.register_full_backward_pre_hook(lambda *_: told.append("experts"))
    module._Exchange.begin = noted_begin  # type: ignore[method-assign]
    module._Exchange.end = noted_end  # type: ignore[method-assign]
    try:
        out = engine(torch.randn(8, m.HIDDEN, requires_grad=True))[0]
        forward = told.copy()
        told.clear()
        engine.backward(out.sum())
    finally:
        module._Exchange.begin = begin  # type: ignore[method-assign]
        module._Exchange.end = end  # type: ignore[method-assign]
    engine.destroy()
    return forward, told


def test_the_dense_branch_runs_while_rows_travel() -> None:
    for forward, backward in run_ranks(2, overlapping):
        assert forward == ["depart", "dense", "arrive", "experts", "depart", "arrive"]
        assert backward == ["depart", "arrive", "experts", "depart", "dense", "arrive"]


def in_place() -> float:
    """An expert that changes its input, one on each rank."""
    import ds_core

    torch.manual_seed(1)
    expert = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(m.HIDDEN, m.HIDDEN))
    layer = MoE(m.HIDDEN, expert, 2, ep_size=2, drop_tokens=False)
    assert layer.experts.way == "grouped"
    engine = ds_core.initialize(model=layer, config={"train_micro_batch_size_per_gpu": 8})[0]
    torch.manual_seed(engine.ctx.rank)
    x = torch.randn(8, m.HIDDEN, requires_grad=True)
    out, _, _ = engine(x)
    engine.backward(out.sum())
    with torch.no_grad():
        gate = layer.gate.wg(x).softmax(1).max(1).values  # both experts are copies of one
        off = float((out - gate[:, None] * expert(x.clone())).abs().max())
    engine.destroy()
    assert x.grad is not None
    return off


def test_an_expert_may_change_its_input() -> None:
    assert max(run_ranks(2, in_place)) < 1e-6


def test_weights_in_stripes_do_not_tell_how_they_are_cut() -> None:
    from ds_moe.experts import partition_dim

    weight = nn.Parameter(torch.ones(4, 2))
    assert partition_dim(weight) is None
    weight.partition_dim = 0  # type: ignore[attr-defined]
    assert partition_dim(weight) == 0
    weight.partition_stride = 2  # type: ignore[attr-defined]
    assert partition_dim(weight) is None
