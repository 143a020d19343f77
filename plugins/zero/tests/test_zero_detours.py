"""What users do to a model under ZeRO besides training it: copies of it, torch.compile, gradients
of gradients.

The truth is plain torch in one process on the data of all ranks.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from ds_testing import run_ranks
from ds_testing.truth import loss_of, plain, start
from torch import Tensor, nn

from ds_core.errors import UsageError

D = 6
STEPS = 3
DECAY = 0.9
OPTIMIZER = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}
DROP = {"max_reuse_distance": 0, "prefetch_bucket_size": 0}


class Net(nn.Module):
    """A weight used in the forward of another module, and one that comes twice."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Linear(D, D)
        self.lin = nn.Linear(D, D)
        self.norm = nn.LayerNorm(D)
        self.register_buffer("shift", torch.full((D,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(torch.tanh(self.lin(torch.tanh(self.emb(x)))))
        return nn.functional.linear(torch.tanh(self.lin(hidden)), self.emb.weight) + self.shift


def net() -> Net:
    torch.manual_seed(0)
    return Net().double()


def data(step: int, rank: int) -> Tensor:
    seed = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(2, D, dtype=torch.float64, generator=seed, requires_grad=True)


def engine_of(model: nn.Module, stage: int, **section: Any) -> Any:
    zero = {"stage": stage, "param_persistence_threshold": 0, **section}
    return start(model, optimizer=OPTIMIZER, zero_optimization=zero)


def world() -> tuple[int, int]:
    from ds_core import comm

    comm.init_distributed("gloo")
    return comm.rank(), comm.world_size()


def trained_plainly(loss: Any = loss_of, after: Any = lambda model: None) -> Net:
    """Plain torch on the data of all ranks; `after` is called with the model after each step."""
    model = net()
    plain(
        model,
        data,
        STEPS,
        count=world()[1],
        loss=loss,
        optimizer=OPTIMIZER,
        after=lambda _: after(model),
    )
    return model


def off(ours: nn.Module, theirs: nn.Module) -> float:
    pairs = zip(ours.state_dict().items(), theirs.state_dict().items(), strict=True)
    return max(float((a - b).abs().max()) if n == m else torch.inf for (n, a), (m, b) in pairs)


# -- copies ----------------------------------------------------------------------------------------


def lerp(ema: nn.Module, model: nn.Module) -> None:
    with torch.no_grad():
        for mine, theirs in zip(ema.parameters(), model.parameters(), strict=True):
            mine.lerp_(theirs, 1 - DECAY)


def check_copies(stage: int) -> None:
    from ds_zero import GatheredParameters

    rank, _ = world()
    truth_ema = net()
    truth = trained_plainly(after=lambda model: lerp(truth_ema, model))
    model = net()
    seen = []
    model.lin.register_forward_hook(lambda *_: seen.append(1))
    engine = engine_of(model, stage)
    ema = copy.deepcopy(engine.module)
    assert off(ema, net()) == 0 and all(p.requires_grad and p.is_leaf for p in ema.parameters())
    for step in range(STEPS):
        engine.backward(loss_of(engine, data(step, rank)))
        engine.step()
        with GatheredParameters(engine.module):
            lerp(ema, engine.module)
    assert off(ema, truth_ema) < 1e-12

    # a part, and inside of other things
    inner = copy.deepcopy({"part": engine.module.lin, "whole": engine.module})
    assert inner["part"] is inner["whole"].lin
    with GatheredParameters(engine.module):
        copied = copy.deepcopy(engine.module)
        assert off(copied, engine.module) == 0
    assert off(copied, truth) < 1e-12 and off(inner["whole"], truth) < 1e-12

    frozen = use_copy(copied, seen, stage)

    # And the engine goes on, as if nobody had copied.
    engine.module.load_state_dict(truth.state_dict())
    engine.backward(loss_of(engine, data(9, rank)))
    engine.step()
    with GatheredParameters(engine.module):
        assert off(engine.module, truth) > 1e-6
    if stage == 3:
        engine.offload_states()
        with pytest.raises(UsageError, match=r"copying the module needs .*reload_states"):
            copy.deepcopy(engine.module)
        engine.reload_states()
    frozen.destroy()
    engine.destroy()


def use_copy(copied: Any, seen: list[int], stage: int) -> Any:
    """An ordinary module: hooks of the user's came along, none of ours; it runs, trains and is
    given to initialize. Returns its engine.
    """
    import ds_core

    rank, _ = world()
    before = len(seen)
    loss = loss_of(copied, data(0, rank))
    loss.backward()
    assert len(seen) == before + 2 and copied.emb.weight.grad is not None
    assert not [
        n
        for part in copied.modules()
        for n in part.__dict__
        if n.startswith("_ds") or n == "__deepcopy__"
    ]
    copied.zero_grad()
    copied.load_state_dict(net().state_dict())
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage}}
    frozen = ds_core.initialize(model=copied, config=config)[0]
    with torch.no_grad():
        assert abs(loss_of(frozen, data(0, rank)) - loss_of(net(), data(0, rank))) < 1e-12
    return frozen


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_copies_are_ordinary_modules(stage: int, ranks: int) -> None:
    run_ranks(ranks, check_copies, stage)


# -- torch.compile ---------------------------------------------------------------------------------


def check_compiled(how: str, section: dict[str, Any]) -> None:
    rank, _ = world()
    torch._dynamo.reset()
    model = net()
    if how == "before":
        model.compile(backend="aot_eager")
    engine = engine_of(model, 3, **section)
    if how == "engine":
        engine.compile(backend="aot_eager")
    run = torch.compile(engine.module, backend="aot_eager") if how == "around" else engine
    for step in range(STEPS):
        engine.backward(loss_of(run, data(step, rank)))
        engine.step()
    engine.destroy()
    assert off(engine.module, trained_plainly()) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize(
    "how", ["engine", *(pytest.param(n, marks=pytest.mark.slow) for n in ("before", "around"))]
)
def test_compiled(how: str) -> None:
    run_ranks(2, check_compiled, how, DROP if how == "engine" else {})


@pytest.mark.slow
@pytest.mark.parametrize("key", ["zero_hpz_partition_size", "mics_shard_size"])
def test_compiled_in_blocks_of_ranks(key: str) -> None:
    run_ranks(4, check_compiled, "engine", {key: 2, "max_reuse_distance": 0})


# -- gradients of gradients ------------------------------------------------------------------------


def penalty(model: Any, x: Tensor) -> Tensor:
    """A gradient penalty on the inputs, and one on the weights."""
    out = model(x)
    params = list(getattr(model, "module", model).parameters())
    (inputs,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    weights = torch.autograd.grad(out.square().mean(), params, create_graph=True)
    return (
        out.square().mean()
        + inputs.square().mean()
        + torch.stack([w.square().sum() for w in weights]).sum() / 10
    )


def check_double(stage: int, section: dict[str, Any]) -> None:
    rank, _ = world()
    engine = engine_of(net(), stage, **section)
    for step in range(STEPS):
        loss = penalty(engine, data(step, rank))
        if step == 1:  # a penalty that is given up, of which nobody takes a backward
            penalty(engine, data(step, rank))
        engine.backward(loss)
        assert stage < 3 or step == 1 or engine.partitioner.gathering.live == 0
        engine.step()
        assert stage < 3 or engine.partitioner.gathering.live == 0
    engine.destroy()
    assert off(engine.module, trained_plainly(penalty)) < 1e-12


@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients_of_gradients(ranks: int) -> None:
    for stage, section in ((1, {}), (2, {}), (3, {}), (3, DROP), (3, {"max_live_parameters": 1})):
        run_ranks(ranks, check_double, stage, section)


# -- what a parameter tells, and Init --------------------------------------------------------------


def check_status() -> None:
    import ds_zero

    rank, ranks = world()
    told = ds_zero.ZeroParamStatus
    torch.manual_seed(0)
    with ds_zero.Init(dtype=torch.float64):
        model = Net()

    def statuses() -> set[ds_zero.ZeroParamStatus]:
        return {p.ds_status for p in model.parameters()}

    assert statuses() == {told.NOT_AVAILABLE}
    with ds_zero.GatheredParameters(model):
        assert statuses() == {told.AVAILABLE}
    assert statuses() == {told.NOT_AVAILABLE}
    engine = engine_of(model, 3, param_persistence_threshold=D + 1, **DROP)  # vectors stay whole
    small = model.lin.bias
    big = model.lin.weight
    seen = []
    model.lin.register_forward_pre_hook(lambda *_: seen.append(getattr(big, "ds_status", None)))
    for step in range(STEPS):
        assert ranks == 1 or (small.ds_status, big.ds_status) == (
            told.AVAILABLE,
            told.NOT_AVAILABLE,
        )
        engine.backward(loss_of(engine, data(step, rank)))
        engine.step()
    assert ranks == 1 or set(seen) == {told.AVAILABLE}
    engine.destroy()
    assert not hasattr(big, "ds_status")
    assert off(model, trained_plainly()) < 1e-12


class Tuned(nn.Module):
    """A frozen base, of which one weight is cut, and what is trained beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(D, D).requires_grad_(False)
        self.extra = nn.Linear(D, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.extra(self.base(x))


def check_attributes() -> None:
    """Of every parameter at stage 3: frozen, whole by its size, on one rank, without an
    optimizer."""
    import ds_core
    from ds_core import comm

    ranks = world()[1]
    names = [
        "ds_id",
        "ds_shape",
        "ds_numel",
        "ds_tensor",
        "ds_status",
        "ds_persist",
        "ds_active_sub_modules",
    ]
    model = Tuned()
    zero = {"stage": 3, "param_persistence_threshold": D + 1}
    frozen = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": zero}
    teacher = ds_core.initialize(model=model.base, config=frozen)[0] if ranks == 1 else None
    engine = engine_of(model, **zero)
    shapes = {n: p.shape for n, p in Tuned().named_parameters()}
    for name, param in model.named_parameters():
        assert [n for n in names if not hasattr(param, n)] == [], name
        assert (param.ds_shape, param.ds_numel) == (shapes[name], shapes[name].numel())
        whole = param.ds_numel <= D or ranks == 1
        assert param.ds_persist is whole and (param.ds_status.name == "AVAILABLE") is whole
        parts = torch.tensor(param.ds_tensor.numel())
        if ranks > 1:
            comm.all_reduce(parts)
        assert parts == param.ds_numel, name
    if teacher is not None:  # both have the frozen base, and the one that is left describes it
        teacher.destroy()
        assert model.base.weight.ds_status.name == "AVAILABLE"
    engine.destroy()
    assert not [n for n in names for p in model.parameters() if hasattr(p, n)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_parameter_has_its_attributes(ranks: int) -> None:
    run_ranks(ranks, check_attributes)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_status_of_parameters_and_init_in_double_precision(ranks: int) -> None:
    run_ranks(ranks, check_status)
