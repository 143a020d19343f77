"""States of single parameters, read and written while training; the truth is plain torch in one
process.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from ds_access.states import locate
from ds_testing import run_ranks
from ds_testing.models import Case, build_model, make_optimizer, micro_batch, param_groups
from torch import Tensor, nn

STAGES = [0, 1, 2, 3]
WORLDS = [1, 2, pytest.param(4, marks=pytest.mark.slow)]
LOSS_SCALE = 128.0
CASES = {
    "fp64": Case(gas=2, clip=0.5),
    "fp32 frozen": Case(dtype="float32", model="frozen"),
    "shared": Case(model="shared"),
    "groups": Case(model="groups", gas=2),
    "unused": Case(model="unused", optimizer="SGD"),
    "partly": Case(model="partly"),
    "bf16": Case(dtype="bfloat16", clip=0.3),
    "fp16": Case(dtype="float16", clip=0.3),
}
LOW = ("bfloat16", "float16")


STORE = "plugins.zero.tests.disk_store"


def start(case: Case, stage: int, place: str = "", folder: str = "") -> Any:
    import ds_core
    from ds_core import comm

    config = case.config(comm.world_size())
    extra: dict[str, Any] = {"offload_optimizer": {"device": place}} if place else {}
    if stage == 3 and place:
        extra["offload_param"] = {"device": place, "max_in_cpu": 0}
    if place == "disk":
        config["plugins"] = {"load": [f"disk={STORE}"]}
        config["disk"] = {"path": folder}
    if case.dtype == "float16":
        config["fp16"] = {"enabled": True, "loss_scale": LOSS_SCALE}
    if stage:
        small = {
            "reduce_bucket_size": 100,
            "param_persistence_threshold": 6,
            "leaf_module": {"classes": "_Net"},
        }
        config["zero_optimization"] = {"stage": stage, **small, **extra}
    model = build(case, seed=comm.rank())
    engine, *_ = ds_core.initialize(
        model=model, model_parameters=param_groups(case, model), config=config
    )
    return engine


def build(case: Case, seed: int = 0) -> nn.Module:
    return build_model(replace(case, dtype="float32") if case.dtype in LOW else case, seed=seed)


def tolerance(case: Case) -> float:
    if case.dtype in LOW:  # a last digit of a master may round a weight the other way, and so on
        return 3e-2
    return 1e-12 if case.dtype == "float64" else 1e-6


def backward(engine: Any, case: Case, step: int, micro: int) -> None:
    from ds_core import comm

    engine.backward(engine(**micro_batch(case, step, micro, comm.rank())))


def far(ours: Tensor, truth: Tensor) -> float:
    assert ours.shape == truth.shape, (ours.shape, truth.shape)
    if not truth.numel():
        return 0.0
    return float((ours.double() - truth.double()).abs().max()) / max(
        float(truth.double().abs().max()), 1e-3
    )


class Truth:
    """The same training in one process of plain torch, that sees what `dp` ranks see."""

    def __init__(self, case: Case, dp: int) -> None:
        self.case = case
        self.dp = dp
        self.model = build(case)
        self.scale = LOSS_SCALE if case.dtype == "float16" else 1.0
        low = case.dtype in LOW
        self.masters = {
            n: nn.Parameter(p.detach().clone(), p.requires_grad) if low else p
            for n, p in self.model.named_parameters()
        }
        groups = param_groups(case, self.model)
        names = {p: n for n, p in self.model.named_parameters()}
        own = [{**g, "params": [self.masters[names[p]] for p in g["params"]]} for g in groups]
        self.optimizer = make_optimizer(case, own)
        if low:
            self.model.to(case.torch_dtype)
        self.params = dict(self.model.named_parameters())

    def backward(self, step: int, micro: int) -> None:
        for index in range(self.dp):
            loss = self.model(**micro_batch(self.case, step, micro, index))
            (loss * (self.scale / self.case.gas / self.dp)).backward()

    def step(self) -> None:
        for name, param in self.params.items():
            if param.grad is not None:
                grad = param.grad.to(self.masters[name].dtype) / self.scale
                param.grad = None
                self.masters[name].grad = grad
        if self.case.clip:
            torch.nn.utils.clip_grad_norm_(
                [m for m in self.masters.values() if m.grad is not None], self.case.clip
            )
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.publish()

    @torch.no_grad()
    def publish(self) -> None:
        for name, param in self.params.items():
            param.copy_(self.masters[name])

    def state(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.optimizer.state.get(self.masters[name], {})
        return found


def check_states(errors: dict[str, float], engine: Any, truth: Truth) -> None:
    import ds_access as access

    trained = {p for g in param_groups(truth.case, engine.module) for p in g["params"]}
    for name, param in engine.module.named_parameters():
        master = access.safe_get_full_fp32_param(param)
        if param not in trained:
            assert master is None
            assert access.safe_get_full_optimizer_state(param, "step") is None
            continue
        assert master is not None
        assert master.dtype == truth.masters[name].dtype
        errors[f"{name} master"] = far(master, truth.masters[name].detach())
        state = truth.state(name)
        for key, value in state.items():
            found = access.safe_get_full_optimizer_state(param, key)
            assert found is not None
            errors[f"{name} {key}"] = far(found, value)
        with pytest.raises(
            ValueError, match=r"'momentum_buffer'|'exp_avg', 'exp_avg_sq', 'step'|before its first"
        ):
            access.safe_get_full_optimizer_state(param, "exp_average")


def check_grads(errors: dict[str, float], engine: Any, truth: Truth, when: str) -> None:
    import ds_access as access

    for name, param in engine.module.named_parameters():
        grad = access.safe_get_full_grad(param)
        wanted = truth.params[name].grad
        assert (grad is None) == (wanted is None), (name, when)
        if grad is not None and wanted is not None:
            assert grad.dtype in (wanted.dtype, engine.ctx.precision.master)
            errors[f"{name} grad {when}"] = far(grad, wanted)


def read(stage: int, name: str, *place: str) -> dict[str, float]:
    import ds_access as access

    from ds_core import comm

    case = CASES[name]
    truth = Truth(case, comm.world_size())
    engine = start(case, stage, *place)
    errors: dict[str, float] = {}
    check_states(errors, engine, truth)
    for step in range(2):
        assert all(access.safe_get_full_grad(p) is None for p in engine.module.parameters())
        for micro in range(case.gas):
            backward(engine, case, step, micro)
            truth.backward(step, micro)
            check_grads(errors, engine, truth, f"{step}.{micro}")
            engine.step()
        truth.step()
        check_states(errors, engine, truth)
    engine.destroy()
    return errors


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(
    "stage", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2)), 3]
)
def test_full_states_equal_one_process(stage: int, world: int) -> None:
    for name in CASES if world == 2 else ("fp64", "partly", "bf16"):
        case = CASES[name]
        for errors in run_ranks(world, read, stage, name):
            assert errors
            assert {k: v for k, v in errors.items() if v > tolerance(case)} == {}, name


def new_value(name: str, what: str, like: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(len(name) + 100 * len(what))
    return (
        torch.randn(like.shape, generator=generator, dtype=torch.float64).to(like.dtype).abs_()
        * 0.1
    )


def write(stage: int, name: str, *place: str) -> dict[str, float]:
    """Set one state after the other, in the program and in the truth, and train on."""
    import ds_access as access

    from ds_core import comm

    case = CASES[name]
    truth = Truth(case, comm.world_size())
    engine = start(case, stage, *place)
    params = {n: p for n, p in engine.module.named_parameters() if p.requires_grad}

    def one(step: int, edit: Callable[[], None] | None = None, at: int = case.gas - 1) -> None:
        for micro in range(case.gas):
            backward(engine, case, step, micro)
            truth.backward(step, micro)
            if edit is not None and micro == at:
                edit()
            engine.step()
        truth.step()

    @torch.no_grad()
    def set_grads() -> None:
        for n, p in params.items():
            if "weight" in n:  # one that nobody used, too
                value = new_value(n, "grad", truth.params[n])
                access.safe_set_full_grad(p, value)
                got = access.safe_get_full_grad(p)
                assert got is not None
                assert torch.equal(got, value)
                truth.params[n].grad = value

    def update_grads() -> None:
        access.safe_update_full_grad_vectorized(
            params.values(), lambda g, p: g.clamp(-0.05, 0.05) * 0.5
        )
        for p in truth.params.values():
            if p.grad is not None:
                p.grad.copy_(p.grad.clamp(-0.05, 0.05) * 0.5)

    one(0)
    errors: dict[str, float] = {}
    for n, p in params.items():
        if not truth.state(n):
            continue
        master = truth.masters[n]
        value = new_value(n, "master", master.detach())
        access.safe_set_full_fp32_param(p, value)
        master.data.copy_(value)
        got = access.safe_get_full_fp32_param(p)
        assert got is not None
        assert torch.equal(got, value)
        for key, old in truth.state(n).items():
            value = new_value(n, key, old) if old.dim() or old.shape == master.shape else old + 3
            value = old + 3 if key == "step" else value
            access.safe_set_full_optimizer_state(p, value, key)
            found = access.safe_get_full_optimizer_state(p, key)
            assert found is not None
            assert torch.equal(found, value)
            old.copy_(value)
    truth.publish()
    one(1)
    check_states(errors, engine, truth)
    one(2, set_grads, at=0)
    one(3, set_grads)
    one(4, update_grads)
    check_states(errors, engine, truth)
    norm = engine.get_global_grad_norm()
    assert norm is not None
    assert norm > 0
    engine.destroy()
    return errors


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(
    "stage", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2)), 3]
)
def test_what_is_set_is_what_the_step_uses(stage: int, world: int) -> None:
    for name in (
        ("fp64", "fp32 frozen", "shared", "unused", "bf16", "fp16")
        if world == 2
        else ("fp64", "bf16")
    ):
        for errors in run_ranks(world, write, stage, name):
            # Every element went through rounded gradients; Adam turns a small difference into a
            # step's length.
            limit = 0.2 if CASES[name].dtype in LOW else 20 * tolerance(CASES[name])
            assert errors
            assert {k: v for k, v in errors.items() if v > limit} == {}, name


@pytest.mark.parametrize(("stage", "place"), [(1, "cpu"), (2, "disk"), (3, "cpu"), (3, "disk")])
def test_wherever_states_rest(stage: int, place: str, tmp_path: Any) -> None:
    for what, name in itertools.product((read, write), ("fp64", "bf16")):
        for errors in run_ranks(2, what, stage, name, place, str(tmp_path)):
            limit = 0.2 if what is write and name == "bf16" else 20 * tolerance(CASES[name])
            assert {k: v for k, v in errors.items() if v > limit} == {}, name


def rounds(stage: int, name: str) -> list[str]:
    """After a master is set, all ranks have the same 16-bit weight: `value` rounded, even if they
    differed in it.
    """
    import ds_access as access
    from ds_testing.kits.train.partitioner import whole_weights

    from ds_core import comm

    case = CASES[name]
    engine = start(case, stage)
    batch = micro_batch(case, 0, 0, comm.rank())
    engine(**batch)  # stage 3 keeps what it has gathered for backward
    wrong = []
    for n, p in engine.module.named_parameters():
        old = access.safe_get_full_fp32_param(p)
        assert old is not None
        access.safe_set_full_fp32_param(p, new_value(n, "x", old) + comm.rank())
        now = access.safe_get_full_fp32_param(p)
        assert now is not None
        everyone = now.new_empty(comm.world_size(), *now.shape)
        comm.all_gather_into_tensor(everyone, now)
        if not all(torch.equal(e, now) for e in everyone):
            wrong.append(f"{n}: masters differ")
        if p.numel() and not torch.equal(p.detach(), now.to(p.dtype)):
            wrong.append(f"{n}: the weight that is whole here is not the master's")
        if not torch.equal(whole_weights(engine)[n], now.to(p.dtype)):
            wrong.append(f"{n}: the weight as it rests is not the master's")
    model = build(case).to(case.torch_dtype)
    model.load_state_dict(
        {n: w.view(model.get_parameter(n).shape) for n, w in whole_weights(engine).items()}, False
    )
    with torch.no_grad():
        if not torch.equal(engine(**batch), model(**batch)):
            wrong.append("the forward does not use it")
    engine.destroy()
    return wrong


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("stage", STAGES)
def test_weights_follow_masters_and_ranks_agree(stage: int, world: int) -> None:
    for name in ("fp64", "bf16"):
        assert run_ranks(world, rounds, stage, name) == [[]] * world, name


def stale_graph(stage: int) -> None:
    import ds_access as access

    from ds_core import comm

    engine = start(CASES["fp64"], stage)
    loss = engine(**micro_batch(CASES["fp64"], 0, 0, comm.rank()))
    param = engine.module.mid.weight
    access.safe_set_full_fp32_param(param, torch.ones(13, 13, dtype=torch.float64))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    engine.destroy()


@pytest.mark.parametrize("stage", STAGES)
def test_a_graph_of_the_old_weight_is_refused(stage: int) -> None:
    run_ranks(1, stale_graph, stage)


def held_back(stage: int) -> dict[str, float]:
    """Gradients inside no_sync and coalesce_grad_reduction are those of the backwards so far, and
    may be set.
    """
    import ds_access as access

    from ds_core import comm

    case = replace(CASES["fp64"], gas=1)
    engine = start(case, stage)
    truth = Truth(case, comm.world_size())
    errors: dict[str, float] = {}
    weight = engine.module.inp.weight
    with engine.coalesce_grad_reduction():
        backward(engine, case, 0, 0)
        truth.backward(0, 0)
        check_grads(errors, engine, truth, "coalesced")
        value = torch.full((13, 7), 0.25, dtype=torch.float64)
        access.safe_set_full_grad(weight, value)
        truth.params["inp.weight"].grad = value.clone()
        check_grads(errors, engine, truth, "set")
        backward(engine, case, 0, 1)
        truth.backward(0, 1)
        check_grads(errors, engine, truth, "twice")
    check_grads(errors, engine, truth, "reduced")
    backward(engine, case, 0, 2)
    truth.backward(0, 2)
    check_grads(errors, engine, truth, "third")
    engine.step()
    truth.step()
    if stage < 2:
        with engine.no_sync():
            backward(engine, case, 1, 0)
            truth.backward(1, 0)
            check_grads(errors, engine, truth, "no_sync")
        backward(engine, case, 1, 1)
        truth.backward(1, 1)
        check_grads(errors, engine, truth, "after no_sync")
        engine.step()
        truth.step()
    check_states(errors, engine, truth)
    engine.destroy()
    return errors


@pytest.mark.parametrize("world", [1, 4])
@pytest.mark.parametrize("stage", STAGES)
def test_gradients_that_are_held_back(stage: int, world: int) -> None:
    for errors in run_ranks(world, held_back, stage):
        assert max(errors.values()) < 1e-12, errors


def accumulation(stage: int) -> tuple[torch.dtype, float]:
    import ds_access as access

    import ds_core
    from ds_core import comm

    model = nn.Linear(7, 5)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "gradient_clipping": 0,
    }
    if stage:
        config["zero_optimization"] = {"stage": stage, "param_persistence_threshold": 0}
    engine, *_ = ds_core.initialize(model=model, config=config)
    for _ in range(2):
        engine.backward(engine(torch.ones(2, 7, dtype=torch.bfloat16) * comm.rank()).float().sum())
        grad = access.safe_get_full_grad(model.weight)
        assert grad is not None
        if engine.is_gradient_accumulation_boundary():
            before = access.safe_get_full_fp32_param(model.weight)
            assert before is not None
            exact = torch.full_like(grad, 1 + 2**-15)  # bf16 could not hold it
            access.safe_set_full_grad(model.weight, exact)
        engine.step()
    after = access.safe_get_full_fp32_param(model.weight)
    assert after is not None
    engine.destroy()
    return grad.dtype, float((before - after - exact).abs().max())


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_have_the_accumulation_dtype(stage: int) -> None:
    for dtype, error in run_ranks(2, accumulation, stage):
        assert dtype == torch.float32
        assert error < 2**-20


def locals_of(world_stage: int) -> list[str]:
    """Stage 3: the ranks' pieces make the whole, and setting a piece changes those elements
    alone."""
    import ds_access as access

    from ds_core import comm

    case = CASES["bf16"]
    engine = start(case, world_stage)
    wrong = []
    backward(engine, case, 0, 0)
    engine.step()
    backward(engine, case, 1, 0)
    getters: dict[str, tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]] = {
        "grad": (access.safe_get_local_grad, access.safe_get_full_grad, access.safe_set_local_grad),
        "master": (
            access.safe_get_local_fp32_param,
            access.safe_get_full_fp32_param,
            access.safe_set_local_fp32_param,
        ),
    }
    for (n, p), (what, (local, full, put)) in itertools.product(
        engine.module.named_parameters(), getters.items()
    ):
        piece = local(p)
        whole = full(p)
        everyone = comm.all_gather_json([piece.double().tolist(), piece.numel()])
        if [v for e in everyone for v in e[0]] != whole.double().flatten().tolist():
            wrong.append(f"{n} {what}: the pieces do not make the whole")
        with pytest.raises(
            RuntimeError, match=rf"holds {piece.numel()} elements.*has {piece.numel() + 1} "
        ):
            put(p, torch.zeros(piece.numel() + 1))
        if what == "master" and p.numel() and comm.world_size() > 1:
            with pytest.raises(RuntimeError, match="whole on every rank"):
                put(p, piece)
            continue
        put(p, torch.full_like(piece, comm.rank() + 1.0))
        expected = [float(r + 1) for r, e in enumerate(everyone) for _ in range(e[1])]
        if full(p).double().flatten().tolist() != expected:
            wrong.append(f"{n} {what}: not what was set")
    for n, p in engine.module.named_parameters():
        size = access.safe_get_local_fp32_param(p).numel()
        with pytest.raises(ValueError, match="has no optimizer state 'nothing'"):
            access.safe_get_local_optimizer_state(p, "nothing")
        if size == 0:  # what the others do must be possible here
            for key in ("exp_avg", "step"):
                assert access.safe_get_local_optimizer_state(p, key).shape == (0,)
            access.safe_set_local_optimizer_state(p, torch.empty(0), "exp_avg")
            access.safe_set_local_optimizer_state(p, torch.tensor(5.0), "step")
            with pytest.raises(RuntimeError, match="elements"):
                access.safe_set_local_optimizer_state(p, torch.zeros(2), "exp_avg")
        else:
            moment = access.safe_get_local_optimizer_state(p, "exp_avg")
            assert moment.shape == (size,)
            access.safe_set_local_optimizer_state(p, moment * 2, "exp_avg")
            assert torch.equal(access.safe_get_local_optimizer_state(p, "exp_avg"), moment * 2)
            assert access.safe_get_local_optimizer_state(p, "step").item() == 1
            access.safe_set_local_optimizer_state(p, torch.tensor(5.0), "step")
            with pytest.raises(ValueError, match="there are 'exp_avg', 'exp_avg_sq', 'step'"):
                access.safe_get_local_optimizer_state(p, "nothing")
            with pytest.raises(RuntimeError, match="elements"):
                access.safe_set_local_optimizer_state(p, torch.zeros(size + 1), "exp_avg")
        assert access.safe_get_full_optimizer_state(p, "step").item() == (
            5 if size or comm.world_size() > 1 else 1
        ), n
    engine.step()
    assert access.safe_get_local_grad(engine.module.inp.weight) is None
    with pytest.raises(RuntimeError, match="no reduced gradient now"):
        access.safe_set_local_grad(
            engine.module.inp.weight, access.safe_get_local_fp32_param(engine.module.inp.weight) * 0
        )
    engine.destroy()
    return wrong


@pytest.mark.parametrize("world", WORLDS)
def test_local_pieces(world: int) -> None:
    assert run_ranks(world, locals_of, 3) == [[]] * world


def mistakes(stage: int) -> None:
    import ds_access as access

    import ds_core

    case = CASES["fp32 frozen"]
    engine = start(case, stage)
    weight = engine.module.inp.weight
    frozen = engine.module.mid.weight
    value = torch.zeros(13, 7)
    for call in (
        lambda: access.safe_set_full_grad(weight, value),
        lambda: access.safe_update_full_grad_vectorized([weight], lambda g, p: g),
    ):
        with pytest.raises(
            RuntimeError, match=r"after engine.backward\(loss\) and before engine.step\(\)"
        ):
            call()
    with pytest.raises(ValueError, match="before its first step"):
        access.safe_set_full_optimizer_state(weight, value, "exp_avg")
    if stage < 3:
        for local in (access.safe_get_local_fp32_param, access.safe_get_local_grad):
            with pytest.raises(RuntimeError, match="stage 3"):
                local(weight)
        with pytest.raises(RuntimeError, match="stage 3"):
            access.safe_set_local_optimizer_state(weight, value, "exp_avg")
    with pytest.raises(
        RuntimeError, match=r"shape \(13, 7\) \(91 elements\), it has \(7, 13\) \(91 elements\)"
    ):
        access.safe_set_full_fp32_param(weight, torch.zeros(7, 13))
    with pytest.raises(RuntimeError, match="no optimizer of a live engine"):
        access.safe_set_full_fp32_param(frozen, torch.zeros(13, 13))
    assert access.safe_get_full_grad(frozen) is None
    with pytest.raises(RuntimeError, match="expected a parameter"):
        access.safe_get_full_grad(value)
    backward(engine, case, 0, 0)
    with pytest.raises(RuntimeError, match="must return the new gradient"):
        access.safe_update_full_grad_vectorized([weight], lambda g, p: None)  # type: ignore[arg-type, return-value]
    weight.requires_grad_(False)
    with pytest.raises(RuntimeError, match=r"'inp.weight' is frozen"):
        access.safe_set_full_grad(weight, value)
    weight.requires_grad_(True)
    engine.step()
    with pytest.raises(RuntimeError, match=r"shape \(13, 7\)"):
        access.safe_set_full_optimizer_state(weight, torch.zeros(91), "exp_avg")
    with pytest.raises(ValueError, match="there are 'exp_avg', 'exp_avg_sq', 'step'"):
        access.safe_set_full_optimizer_state(weight, value, "momentum")
    engine.destroy()
    assert access.safe_get_full_fp32_param(weight) is None
    ds_core.reset()


@pytest.mark.parametrize("stage", STAGES)
def test_mistakes_are_told(stage: int) -> None:
    run_ranks(2, mistakes, stage)


def vectorized_messages(stage: int) -> tuple[int, bool]:
    """Broadcasts for one pass over all parameters."""
    import ds_access as access
    from ds_access import unshard as put

    from ds_core import comm

    engine = start(CASES["fp64"], stage)
    backward(engine, CASES["fp64"], 0, 0)
    backward_args = list(engine.module.parameters())
    one_by_one = [access.safe_get_full_grad(p) for p in backward_args]
    seen: list[Any] = []
    count = 0
    original = comm.broadcast

    def counting(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        return original(*args, **kwargs)

    put.comm.broadcast = counting  # type: ignore[attr-defined]
    try:
        access.safe_update_full_grad_vectorized(
            backward_args, lambda g, p: (seen.append(g.clone()), g)[1]
        )
    finally:
        put.comm.broadcast = original  # type: ignore[attr-defined]
    same = all(torch.equal(a, b) for a, b in zip(one_by_one, seen, strict=True) if a is not None)
    engine.destroy()
    return count, same


@pytest.mark.parametrize("stage", [2, 3])
def test_the_vectorized_update_is_one_pass(stage: int) -> None:
    for count, same in run_ranks(2, vectorized_messages, stage):
        assert same
        assert count == 2  # one per owner, for six parameters


def axes(stage: int) -> list[str]:
    """Parameters that ranks hold differently: each rank reads and writes its own."""
    import ds_access as access
    from ds_testing.kits.train.partitioner import whole_weights

    import ds_core
    from ds_core import comm

    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.02}},
        "gradient_clipping": 0,
        "fake_axes": {"axes": {"ep": 2}},
        "plugins": {"load": ["fake_axes=ds_testing.kits.parallel.fake_axes"]},
    }
    if stage:
        config["zero_optimization"] = {"stage": stage, "param_persistence_threshold": 4}
    torch.manual_seed(comm.rank() % 2)
    model = nn.ModuleDict({n: nn.Linear(5, 3) for n in ("everywhere", "held_ep")}).double()
    engine, *_ = ds_core.initialize(model=model, config=config)
    x = torch.ones(2, 5, dtype=torch.float64) * (comm.rank() + 1)
    engine.backward(sum(model[n](x).sum() for n in model))
    wrong = []
    expert = engine.ctx.params[model["held_ep"].weight].replicas
    ranks = engine.ctx.mesh.ranks(*expert)
    for n, of in (("everywhere", range(comm.world_size())), ("held_ep", ranks)):
        grad = access.safe_get_full_grad(model[n].weight)
        expected = sum(2 * (r + 1) for r in of) / comm.world_size()
        if grad is None or not torch.allclose(grad, torch.full_like(grad, expected), atol=1e-12):
            wrong.append(f"{n}: {grad} is not {expected}")
        access.safe_set_full_grad(model[n].weight, torch.full((3, 5), 0.5, dtype=torch.float64))
        access.safe_set_full_fp32_param(
            model[n].weight, torch.full((3, 5), float(min(of)), dtype=torch.float64)
        )
    engine.step()
    for n, of in (("everywhere", range(comm.world_size())), ("held_ep", ranks)):
        found = whole_weights(engine)[f"{n}.weight"]
        decayed = (
            min(of) * (1 - 0.02 * 0.01)
            if engine.optimizer.param_groups[0]["weight_decay"]
            else min(of)
        )
        if not torch.allclose(found, torch.full_like(found, decayed - 0.02), atol=1e-6):
            wrong.append(f"{n}: {found}")
    engine.destroy()
    return wrong


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("stage", STAGES)
def test_parameters_held_on_an_axis(stage: int, world: int) -> None:
    assert run_ranks(world, axes, stage) == [[]] * world


def whole_tensors(stage: int) -> dict[str, float]:
    """Adafactor updates whole tensors, on one rank each, and keeps states of rows and of
    columns."""
    import ds_access as access

    import ds_core
    from ds_core import comm

    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_clipping": 0,
        "optimizer": {"type": "Adafactor", "params": {"lr": 0.05}},
    }
    if stage:
        small = {"reduce_bucket_size": 100, "param_persistence_threshold": 6}
        config["zero_optimization"] = {"stage": stage, **small}
    case = Case()
    truth = Truth(case, comm.world_size())
    truth.optimizer = torch.optim.Adafactor(list(truth.masters.values()), lr=0.05)
    engine, *_ = ds_core.initialize(model=build(case, seed=comm.rank()), config=config)
    errors: dict[str, float] = {}
    for step in range(3):
        backward(engine, case, step, 0)
        truth.backward(step, 0)
        check_grads(errors, engine, truth, str(step))
        for n, p in engine.module.named_parameters():
            if step == 1:
                value = new_value(n, "grad", truth.params[n])
                access.safe_set_full_grad(p, value)
                truth.params[n].grad = value
        engine.step()
        truth.step()
        for n, p in engine.module.named_parameters():
            for key, old in truth.state(n).items():
                found = access.safe_get_full_optimizer_state(p, key)
                assert found is not None
                errors[f"{n} {key} {step}"] = far(found, old)
                if step == 0:
                    value = old + 2 if key == "step" else new_value(n, key, old)
                    access.safe_set_full_optimizer_state(p, value, key)
                    old.copy_(value)
            master = access.safe_get_full_fp32_param(p)
            assert master is not None
            errors[f"{n} master {step}"] = far(master, truth.masters[n].detach())
            value = new_value(n, "master", truth.masters[n].detach())
            access.safe_set_full_fp32_param(p, value)
            truth.masters[n].data.copy_(value)
            if stage == 3 and comm.world_size() > 1:
                mine = access.safe_get_local_fp32_param(p)
                assert mine is not None
                assert mine.numel() in (0, value.numel())
                held = locate(engine, p)
                # its owner has the weight whole, too
                if held.local and held.ranges == held.updated_ranges:
                    continue
                with pytest.raises(RuntimeError, match=r"whole on (one|every) rank"):
                    access.safe_set_local_fp32_param(p, mine)
        if stage == 3:
            engine.offload_states()
            engine.reload_states()
    engine.destroy()
    return errors


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_optimizers_of_whole_tensors(stage: int, world: int) -> None:
    for errors in run_ranks(world, whole_tensors, stage):
        assert {k: v for k, v in errors.items() if v > 1e-12} == {}
