"""Each layout gives what plain torch gives in one process, on all ranks."""

from __future__ import annotations

import math
from typing import Any

import ds_zero  # noqa: F401  - these need them installed
import pytest
import torch
import torch.distributed as dist
from ds_moe import MoE
from ds_pipeline import PipelineModule
from ds_sequence_parallel import CrossEntropy
from ds_testing import RemoteError, run_ranks
from ds_testing.truth import start
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ds_core.engine import make_loader

MICRO = 2
N = 13
WIDTH = 6
X = torch.arange(float(N * WIDTH), dtype=torch.float64).reshape(N, WIDTH).sin()
Y = torch.arange(N) % 4
DATA = TensorDataset(X, Y)


class Hidden(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up_proj = nn.Linear(WIDTH, 8)
        self.down_proj = nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down_proj(torch.tanh(self.up_proj(x)))
        return out


class Experts(nn.Module):
    ranks = 1

    def __init__(self) -> None:
        super().__init__()
        options = {"use_rts": False, "drop_tokens": False, "min_capacity": 0}
        self.moe = MoE(WIDTH, Hidden(), 2, ep_size=self.ranks, **options)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.moe(x)[0]
        return out


class DividedExperts(Experts):
    ranks = 2


def layers(hidden: Any = Hidden) -> list[nn.Module]:
    torch.manual_seed(5)
    return [hidden(), hidden(), nn.Dropout(0.5), nn.Linear(WIDTH, 4)]


class Net(nn.Module):
    """Takes what a loader gives, and returns logits."""

    def __init__(self, hidden: Any = Hidden) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers(hidden))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


class Tokens(nn.Module):
    """Its loss is the mean over all tokens of a batch, which ranks of `sp` divide."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.Sequential(nn.Embedding(7, WIDTH), Hidden(), nn.Linear(WIDTH, 7))
        self.loss = CrossEntropy()

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        out: Tensor = self.loss(self.layers(ids), labels)
        return out


def piped() -> nn.Module:
    return PipelineModule(layers(), loss_fn=nn.functional.cross_entropy, num_stages=2)


METRICS = {
    "loss": lambda out, batch: nn.functional.cross_entropy(out, batch[1], reduction="none"),
    "accuracy": lambda out, batch: out.argmax(-1) == batch[1],
    "label": lambda out, batch: (batch[1].sum(), len(batch[1])),
}


def truth(model: nn.Module) -> dict[str, float]:
    model.double().eval()
    with torch.no_grad():
        rows = [(model(X[i : i + 1], Y[i : i + 1]), (X[i : i + 1], Y[i : i + 1])) for i in range(N)]
    found = {}
    for name, metric in METRICS.items():
        values = [metric(out, batch) for out, batch in rows]  # type: ignore[no-untyped-call]
        sums = [float(v[0]) for v in values]
        found[name] = math.fsum(sums) / N
    return found


class Summing:
    """As an object of torchmetrics works: its state is exchanged by `compute`, over its group."""

    process_group: Any = None
    distributed_available_fn = staticmethod(dist.is_initialized)

    def reset(self) -> None:
        self.sums = torch.zeros(2, dtype=torch.float64)

    def update(self, logits: Tensor, labels: Tensor) -> None:
        self.sums += torch.tensor([float((logits.argmax(-1) == labels).sum()), len(labels)])

    def compute(self) -> Tensor:
        assert not torch.is_grad_enabled()
        if self.distributed_available_fn():
            dist.all_reduce(self.sums, group=self.process_group)
        return self.sums[0] / self.sums[1]


def check(case: str) -> dict[str, float]:
    _, make, sections, whole = CASES[case]
    expected = truth(whole())
    engine = start(make().double(), micro=MICRO, **sections)
    counted = Summing()
    objects = {"object": (counted, lambda out, batch: (out, batch[1]))}
    for data in loaders(engine):
        found = engine.evaluate(data, METRICS | objects)
        assert found.pop("object") == pytest.approx(expected["accuracy"], abs=1e-15)
        assert found == pytest.approx(expected, rel=1e-12)
        # These depend on nothing that is rounded.
        assert (found["accuracy"], found["label"]) == (expected["accuracy"], expected["label"])
        assert counted.process_group is None and counted.distributed_available_fn is not None
    engine.destroy()
    return found


def loaders(engine: Any) -> list[Any]:
    """The same samples in other shares: as a dataset, by samplers that pad, unequally, and all on
    one rank.
    """
    mesh = engine.ctx.mesh
    size, index = mesh.size("batch"), mesh.index("batch")
    sampler: DistributedSampler[Any] = DistributedSampler(DATA, size, index, shuffle=True)
    # Of four ranks the last has none.
    mine = [i for i in range(N) if (i // 3 if i < 9 else 0) % size == index]
    unequal = [(X[i : i + 1], Y[i : i + 1]) for i in mine]
    one = DataLoader(DATA, batch_size=5) if index == size - 1 else []
    padded = DataLoader(DATA, batch_size=MICRO, sampler=sampler)
    return [DATA, padded, make_loader(engine.ctx, DATA), unequal, one]


def zero(stage: int) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, "param_persistence_threshold": 4}}


def experts() -> nn.Module:
    return Net(Experts)


def divided() -> nn.Module:
    return Net(DividedExperts)


TP = {"tensor_parallel": {"autotp_size": 2}}
CASES: dict[str, tuple[int, Any, dict[str, Any], Any]] = {
    "1": (1, Net, {}, Net),
    "dp2": (2, Net, {}, Net),
    "dp4 zero1": (4, Net, zero(1), Net),
    "dp2 zero2": (2, Net, zero(2), Net),
    "dp3 zero3": (3, Net, zero(3), Net),
    "dp4 zero3": (4, Net, zero(3), Net),
    "tp2": (2, Net, TP, Net),
    "tp2 dp2 zero3": (4, Net, TP | zero(3), Net),
    "pp2": (2, piped, {}, Net),
    "pp2 gas3": (2, piped, {"gas": 3}, Net),
    "pp2 dp2 zero1": (4, piped, {"gas": 2} | zero(1), Net),
    "ep2": (2, divided, {}, experts),
    "ep2 dp2 zero2": (4, divided, zero(2), experts),
}


@pytest.mark.fast_cases("1", "dp2", "dp3 zero3", "tp2", "pp2 dp2 zero1", "ep2")
@pytest.mark.parametrize("case", CASES)
def test_every_layout_gives_what_one_process_gives(case: str) -> None:
    found = run_ranks(CASES[case][0], check, case)
    assert all(row == found[0] for row in found)


def tokens() -> float:
    ids = torch.arange(7 * 8).reshape(7, 8) % 7
    labels = ids.roll(1, 1)
    model = Tokens().double()
    with torch.no_grad():
        expected = float(model(ids, labels))
    section = {"size": 2, "inputs": {"ids": 1, "labels": 1}}
    engine = start(Tokens().double(), micro=2, sequence_parallel=section)
    found: dict[str, float] = engine.evaluate(
        TensorDataset(ids, labels),
        {"loss": lambda loss, batch: (loss * batch[1].numel(), batch[1].numel())},
    )
    engine.destroy()
    assert found["loss"] == pytest.approx(expected, rel=1e-12)
    return found["loss"]


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_losses_of_divided_sequences(world: int) -> None:
    assert len(set(run_ranks(world, tokens))) == 1


def in_bf16() -> dict[str, float]:
    engine = start(Net(), micro=MICRO, bf16={"enabled": True}, **zero(3))
    data = TensorDataset(X.float(), Y)
    found: dict[str, float] = engine.evaluate(
        data, METRICS, forward=lambda engine, batch: engine(batch[0].bfloat16(), batch[1])
    )
    engine.destroy()
    return found


def test_bf16() -> None:
    found = run_ranks(2, in_bf16)
    assert found[0] == found[1]
    assert found[0]["loss"] == pytest.approx(truth(Net())["loss"], rel=0.02)


# -- ranks that differ, and ranks that fail --------------------------------------------------------


def differing() -> str:
    engine = start(Net().double(), micro=MICRO)
    names = ["loss", "accuracy"] if dist.get_rank() == 0 else ["loss", "label"]
    try:
        engine.evaluate(DATA, {name: METRICS[name] for name in names})
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        engine.destroy()
    return "no error"


def test_ranks_with_other_metrics_are_refused_on_all() -> None:
    text = (
        "UsageError: engine.evaluate: rank 0 has the metrics accuracy, loss, and rank 1 has "
        "label, loss; give all ranks the same"
    )
    assert run_ranks(2, differing) == [text, text]


def failing() -> str:
    engine = start(Net().double(), micro=MICRO)

    def metric(out: Tensor, batch: Any) -> Tensor:
        if dist.get_rank() == 1:
            raise ValueError("no such label")
        return out[:, 0]

    try:
        engine.evaluate(DATA, {"m": metric})
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        engine.destroy()
    return "no error"


def test_what_fails_on_one_rank_ends_all() -> None:
    first, second = run_ranks(2, failing)
    assert second == "ValueError: no such label"
    assert first == "LostRankError: rank 1 stopped, and so do all: ValueError: no such label"


class Alone:
    def update(self, outputs: Any, batch: Any) -> None: ...

    def compute(self) -> float:
        return 0.0


def objects() -> None:
    engine = start(Net().double(), micro=MICRO)
    try:
        engine.evaluate(DATA, {"m": Alone()})
    finally:
        engine.destroy()


def test_an_object_that_cannot_be_combined_is_refused() -> None:
    with pytest.raises(RemoteError, match="metric 'm', a Alone, has no process_group"):
        run_ranks(2, objects)
    run_ranks(1, objects)


class Odd:
    def __init__(self, x: Tensor) -> None:
        self.x = x


def unsendable() -> None:
    engine = start(Net().double(), micro=MICRO)
    mine = [Odd(X)] if dist.get_rank() == 0 else []
    try:
        engine.evaluate(mine, {}, forward=lambda engine, odd: engine(odd.x, None))
    finally:
        engine.destroy()


def test_a_batch_that_cannot_be_sent_is_refused() -> None:
    with pytest.raises(RemoteError, match="a Odd in another rank's cannot be sent"):
        run_ranks(2, unsendable)


# -- who else sees it ------------------------------------------------------------------------------


def test_monitors_and_observers_get_it(tmp_path: Any) -> None:
    run_ranks(1, seen, str(tmp_path))
    rows = next(tmp_path.rglob("*eval_loss*")).read_text().splitlines()
    assert len(rows) == 2


def seen(folder: str) -> None:
    engine = start(
        Net().double(),
        micro=MICRO,
        csv_monitor={"enabled": True, "output_path": folder, "job_name": "job"},
    )
    phases = []
    tell = engine.telemetry._tell_all
    engine.telemetry._tell_all = lambda hook, **rest: (  # type: ignore[method-assign]
        phases.append((hook, dict(rest.get("metrics", {})))),
        tell(hook, **rest),
    )
    found = engine.evaluate(DATA, METRICS)
    quiet = engine.evaluate(DATA, METRICS, prefix="")
    engine.destroy()
    assert found == quiet
    assert phases == [("ds_phase_begin", {}), ("ds_phase_end", found)] * 2
