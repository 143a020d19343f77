"""Stage 3 with models that use their modules in every way; the truth is plain torch in one
process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from ds_testing import run_ranks
from ds_testing.models import complex_run
from ds_testing.truth import start
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

D = 6
SETTINGS: dict[str, dict[str, Any]] = {
    "keep": {},
    "drop": {"max_reuse_distance": 0, "prefetch_bucket_size": 0},
    "tight": {"max_live_parameters": 1, "prefetch_bucket_size": 1000},
    "one by one": {"allgather_sequential": True, "contiguous_gradients": False},
    "all-reduce": {
        "use_all_reduce_for_fetch_params": True,
        "reduce_scatter": False,
        "max_reuse_distance": 0,
    },
}


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(D, D)
        self.b = nn.Linear(D, D)

    def forward(self, x: Tensor, step: int) -> Any:
        return self.b(torch.tanh(self.a(torch.tanh(self.b(torch.tanh(self.a(x)))))))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Linear(D, D, bias=False)
        self.mid = nn.Linear(D, D)
        self.head = nn.Linear(D, D, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, x: Tensor, step: int) -> Any:
        return self.head(torch.tanh(self.mid(self.emb(x))))


class External(nn.Module):
    """Reads a child's weight, a parameter list's, and one through a container without parameters of
    its own.
    """

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Linear(D, D)
        self.mid = nn.Sequential(nn.Linear(D, D), nn.Tanh())
        self.more = nn.ParameterList([nn.Parameter(torch.randn(D, D)) for _ in range(2)])

    def forward(self, x: Tensor, step: int) -> Any:
        h = self.mid(self.emb(x)) @ self.more[step % 2]
        return F.linear(h, self.emb.weight) + self.mid[0].bias


class Giver(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(D, D))

    def forward(self) -> Tensor:
        return self.weight


class Returned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.giver = Giver()
        self.lin = nn.Linear(D, D)

    def forward(self, x: Tensor, step: int) -> Any:
        weight = self.giver()
        return torch.tanh(self.lin(x)) @ weight


class Recomputed(nn.Module):
    reentrant = False

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(D, D)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D)) for _ in range(3)
        )
        self.tail = nn.Parameter(torch.randn(D, D))

    def forward(self, x: Tensor, step: int) -> Any:
        x = self.inp(x)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=self.reentrant)
        return x @ self.tail


class Reentrant(Recomputed):
    reentrant = True


class ReentrantShared(Reentrant):
    """One block three times: its gradients come in three nested backwards."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([self.blocks[0]] * 3)


class Dynamic(nn.Module):
    """Another order, and other modules, every step; the same on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(D, D) for _ in range(4))

    def forward(self, x: Tensor, step: int) -> Any:
        order = ([0, 1, 2, 3], [3, 1], [2, 0, 3], [0, 1, 2, 3])[step % 4]
        for i in order:
            x = torch.tanh(self.parts[i](x)) + x
        return x


class LowRank(nn.Module):
    """Frozen weights with small trained ones beside them, in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(D, D)
        self.out = nn.Linear(D, D)
        self.down = nn.Parameter(torch.randn(D, 2))
        self.up = nn.Parameter(torch.randn(2, D))
        for layer in (self.inp, self.out):
            layer.requires_grad_(False)

    def forward(self, x: Tensor, step: int) -> Any:
        return self.out(torch.tanh(self.inp(x) + x @ self.down @ self.up))


@dataclass
class Answer:
    value: Tensor
    note: str = ""


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(D, D)

    def forward(self, *, h: Tensor) -> Any:
        return {"deep": [Answer(self.lin(h))]}


class Hidden:
    """An output that no one can look into."""

    __slots__ = ("value",)

    def __init__(self, value: Tensor) -> None:
        self.value = value


class Opaque(Wrapped):
    def forward(self, *, h: Tensor) -> Any:
        return Hidden(torch.tanh(self.lin(h)))


class Outputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(D, D)
        self.wrapped = Wrapped()
        self.opaque = Opaque()
        self.empty = nn.Parameter(torch.empty(0, D))
        self.scalar = nn.Parameter(torch.tensor(1.5))
        self.bare = nn.Identity()

    def forward(self, x: Tensor, step: int) -> Any:
        h = self.wrapped(h=self.bare(self.inp(x)))["deep"][0].value
        return self.opaque(h=h).value * self.scalar + self.empty.sum()


class Normed(nn.Module):
    """A parametrised weight, whose graph goes on above the module's inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.utils.parametrizations.weight_norm(nn.Linear(D, D))
        self.conv = nn.Conv1d(1, 1, 3, padding=1)
        self.norm = nn.BatchNorm1d(D)

    def forward(self, x: Tensor, step: int) -> Any:
        return torch.tanh(self.conv(self.lin(self.norm(x)).unsqueeze(1)).squeeze(1))


ZOO: dict[str, Callable[[], nn.Module]] = {
    c.__name__: c
    for c in (
        Twice, Tied, External, Returned, Recomputed, Reentrant, ReentrantShared, Dynamic, LowRank, Outputs, Normed
    )
}  # fmt: skip


def data(step: int, rank: int, micro: int = 0) -> Tensor:
    seed = torch.Generator().manual_seed(1000 * step + 10 * rank + micro)
    return torch.randn(4, D, dtype=torch.float64, generator=seed, requires_grad=True)


def engine_of(name: str, section: dict[str, Any] | None, gas: int = 1) -> Any:
    torch.manual_seed(0)
    zero = {"stage": 3, "param_persistence_threshold": 2, **(section or {})}
    return start(
        ZOO[name]().double(),
        micro=4,
        gas=gas,
        clip=0.5,
        optimizer={"type": "AdamW", "params": {"lr": 0.02, "weight_decay": 0.1}},
        zero_optimization=zero if section is not None else {"stage": 0},
    )


def checked_losses(
    engine: Any, steps: int = 3, gas: int = 1, *, direct: bool = False
) -> list[float]:
    from ds_core import comm

    losses = []
    for step in range(steps):
        for micro in range(gas):
            with torch.no_grad():
                engine(data(step, 7), step)  # an evaluation in between
            loss = engine(data(step, comm.rank(), micro), step).square().mean()
            losses.append(loss.item())
            loss.backward() if direct else engine.backward(loss)
            nothing_gathered(engine)
            engine.step()
    return losses


def nothing_gathered(engine: Any) -> None:
    gathering = getattr(engine.partitioner, "gathering", None)
    if gathering is not None:
        assert gathering.live == 0
        for unit in gathering.units:
            assert unit.bucket.full.untyped_storage().nbytes() == 0
            assert all(p.numel() == 0 for p in unit.bucket.params)


def weights(engine: Any) -> dict[str, Tensor]:
    from ds_testing.truth import whole_weights

    found: dict[str, Tensor] = whole_weights(engine)
    return found


def truth_of(
    name: str, gas: int, world: int, steps: int = 3
) -> tuple[list[list[float]], dict[str, Tensor]]:
    """Plain torch in one process on the data of all ranks: each rank's losses, and the weights."""
    torch.manual_seed(0)
    model = ZOO[name]().double()
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=0.02, weight_decay=0.1
    )
    losses: list[list[float]] = [[] for _ in range(world)]
    for step in range(steps):
        for micro in range(gas):
            for rank in range(world):
                loss = model(data(step, rank, micro), step).square().mean()
                losses[rank].append(loss.item())
                (loss / gas / world).backward()
        nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return losses, {n: p.detach() for n, p in model.named_parameters()}


def errors_of(name: str, direct: bool, gas: int) -> dict[str, float]:
    from ds_core import comm

    all_losses, truth = truth_of(name, gas, comm.world_size())
    worst = {}
    for setting, section in list(SETTINGS.items())[: 2 if direct else None]:
        engine = engine_of(name, section, gas)
        ours = checked_losses(engine, gas=gas, direct=direct)
        assert engine.partitioner.units, "nothing is partitioned"
        found = weights(engine)
        off = [abs(a - b) for a, b in zip(ours, all_losses[comm.rank()], strict=True)]
        off += [float((found[n] - truth[n]).abs().max()) for n in truth if truth[n].numel()]
        worst[setting] = max(off)
        engine.destroy()
        for n, p in engine.module.named_parameters():
            assert torch.equal(p.detach().double(), found[n]), n
    return worst


@pytest.mark.fast_cases("External-False", "ReentrantShared-False", "Dynamic-False")
@pytest.mark.parametrize("direct", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", list(ZOO))
def test_every_way_of_using_modules(name: str, direct: bool) -> None:
    for answer in run_ranks(2, errors_of, name, direct, 1 if direct else 2):
        assert max(answer.values()) < 1e-12, answer


def check_misuse_and_detours() -> None:
    from ds_core import comm

    rank = comm.rank()
    engine = engine_of("Tied", {"max_reuse_distance": 10**9})
    checked_losses(engine, 2)
    model = engine.module
    x = data(9, rank)

    # Two forwards, one backward; gradients dropped in between, which releases nothing that backward
    # needs.
    loss = engine(x, 0).sum() + engine(data(8, rank), 0).sum()
    engine.zero_grad()
    engine.backward(loss)
    nothing_gathered(engine)
    engine.step()

    # A part of the model by itself, forward and backward.
    engine.backward(model.mid(x).square().mean())
    nothing_gathered(engine)
    engine.step()

    # A forward that fails half-way, on all ranks; then training goes on.
    with pytest.raises(RuntimeError):
        engine(torch.zeros(4, D + 1, dtype=torch.float64), 0)
    assert not engine.partitioner.hooks._stack
    checked_losses(engine, 1)

    # A backward that fails half-way, on all ranks.
    def fail(grad: Tensor) -> None:
        raise ArithmeticError("on purpose")

    x = data(7, rank)
    x.register_hook(fail)
    with pytest.raises(ArithmeticError):
        engine(x, 0).square().mean().backward()
    engine.zero_grad()
    checked_losses(engine, 2, direct=True)
    x = data(9, rank)

    # A weight taken out of the model and used by hand is an error, not a wrong number.
    weight = model.mid.weight
    with pytest.raises((RuntimeError, IndexError)):
        F.linear(x, weight)
    assert weight.ds_shape == (D, D)
    assert engine.partitioner.partitions_gradients
    with pytest.raises(AssertionError, match="no_sync cannot be used"), engine.no_sync():
        pass
    engine.destroy()
    assert model(x, 0).shape == (4, D)


def test_misuse_and_detours() -> None:
    run_ranks(2, check_misuse_and_detours)


def check_thawing(stage: int) -> float:
    """A frozen layer is trained from the third step on."""
    import ds_core
    from ds_core import comm

    def model() -> nn.Module:
        torch.manual_seed(0)
        found = Twice().double()
        found.b.requires_grad_(False)
        return found

    plain = model()
    truth = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    ours = model()
    engine, *_ = ds_core.initialize(
        model=ours,
        model_parameters=list(ours.parameters()),
        config={
            "train_micro_batch_size_per_gpu": 4,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
            "zero_optimization": {"stage": stage, "param_persistence_threshold": 0},
        },
    )
    for step in range(5):
        if step == 2:
            plain.b.requires_grad_(True)
            ours.b.requires_grad_(True)
        engine.backward(engine(data(step, comm.rank()), step).square().mean())
        engine.step()
        for rank in range(2):
            (plain(data(step, rank), step).square().mean() / 2).backward()
        truth.step()
        truth.zero_grad()
    found = weights(engine)
    engine.destroy()
    return max(float((found[n] - p.detach()).abs().max()) for n, p in plain.named_parameters())


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_frozen_layer_may_be_thawed(stage: int) -> None:
    assert max(run_ranks(2, check_thawing, stage)) < 1e-12


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_complex_parameters(stage, world):
    section = {"zero_optimization": {"stage": stage, "param_persistence_threshold": 0}}
    for error in run_ranks(world, complex_run, section):
        assert error < 1e-5
