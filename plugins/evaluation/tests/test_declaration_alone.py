"""The declaration, and what one process evaluates; they need no other package of this repository."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
from ds_evaluation.metrics import ExactSum
from ds_testing import EngineMethodsConformance, PluginConformance
from ds_testing.one_process import one_process_engine
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from ds_core.errors import UsageError

CONFIG = {"train_micro_batch_size_per_gpu": 3, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
REQUIRED = {**CONFIG, "plugins": {"require": ["dscore-evaluation"]}}
X = torch.arange(20.0).reshape(10, 2)


class TestPlugin(PluginConformance):
    entry_point = "ds_evaluation.plugin"


class TestMethods(EngineMethodsConformance):
    config: ClassVar[dict[str, Any]] = {"plugins": {"require": ["dscore-evaluation"]}}
    names = ("evaluate",)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        assert not torch.is_grad_enabled()
        out: Tensor = self.drop(self.layer(x))
        return out


@pytest.fixture
def engine() -> Iterator[Any]:
    torch.manual_seed(0)
    with one_process_engine(Net(), CONFIG) as engine:
        yield engine


def truth(engine: Any) -> float:
    layer = engine.module.layer
    return float(nn.functional.linear(X, layer.weight, layer.bias).detach().double().mean())


def test_a_dataset_and_a_loader_give_the_same_and_modes_are_restored(engine: Any) -> None:
    engine.train()
    engine.module.drop.eval()
    data = TensorDataset(X)
    metrics = {"mean": lambda out, batch: out[:, 0]}
    found = engine.evaluate(data, metrics)
    assert found == engine.evaluate(DataLoader(data, batch_size=3), metrics)
    assert found["mean"] == pytest.approx(truth(engine), rel=1e-6)
    assert engine.module.training and not engine.module.drop.training


def test_pairs_numbers_and_bools_count(engine: Any) -> None:
    found = engine.evaluate(
        TensorDataset(X),
        {
            "pair": lambda out, batch: (batch[0].sum(), batch[0].numel()),
            "bools": lambda out, batch: batch[0][:, 0] < 4,
            "nothing": lambda out, batch: (0.0, 0),
            "tokens": lambda out, batch: batch[0],
        },
    )
    assert math.isnan(found.pop("nothing"))
    assert found == {"pair": 9.5, "bools": 0.2, "tokens": 9.5}
    assert all(type(value) is float for value in found.values())


def test_the_caller_runs_batches_of_its_own(engine: Any) -> None:
    rows = [{"x": X, "y": torch.zeros(10)}]
    found = engine.evaluate(
        rows,
        {"loss": lambda out, batch: (out[:, 0] - batch["y"]).square()},
        forward=lambda engine, batch: engine(batch["x"]),
    )
    assert found["loss"] > 0


def test_a_stream_is_taken_as_it_is(engine: Any) -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(X)

    assert engine.evaluate(Stream(), {"x": lambda out, batch: batch}) == {"x": 9.5}


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        (lambda out, batch: out.mean(), "'m' returned a tensor of shape ()"),
        (lambda out, batch: 1.0, "'m' returned a float; it must return a tensor with one value"),
        (lambda out, batch: (out, 3), "'m' returned a tuple"),
        (lambda out, batch: None, "'m' returned a NoneType"),
        (7, "metric 'm' is a int; it must be a function"),
        (nn.Linear, "metric 'm' is a type"),
    ],
)
def test_wrong_metrics_are_refused(engine: Any, metric: Any, message: str) -> None:
    engine.train()
    with pytest.raises(UsageError) as caught:
        engine.evaluate(TensorDataset(X), {"m": metric})
    assert message in str(caught.value)
    assert engine.module.training


def test_wrong_data_is_refused(engine: Any) -> None:
    with pytest.raises(UsageError, match="needs a torch.utils.data.Dataset or a loader, not a int"):
        engine.evaluate(7, {})
    with pytest.raises(UsageError, match="no rank has a batch; is the dataset empty"):
        engine.evaluate([], {"m": lambda out, batch: out})


def test_errors_of_a_metric_come_through(engine: Any) -> None:
    with pytest.raises(ZeroDivisionError):
        engine.evaluate(TensorDataset(X), {"m": lambda out, batch: 1 / 0})


def test_sums_are_exact() -> None:
    values = [1e100, 1.0, -1e100, 1e-30, 3.0, -4.0] * 3
    exact = ExactSum()
    for value in values:
        exact.add(value)
    assert math.fsum(exact.parts) == math.fsum(values)
    for value, total in ((math.inf, math.inf), (-math.inf, math.nan)):
        exact.add(value)
        assert str(sum(exact.parts)) == str(total)
