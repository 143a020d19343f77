"""Methods of the engine under DeepSpeed's names; without this package they are errors that name
it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ds_testing.truth import start
from torch import nn

from ds_core.engine import DistributedLoader


def engine_of(net: nn.Module | None = None, **config: Any) -> Any:
    sgd = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.5}}
    sections = {"train_batch_size": 4, **config}
    net = net or nn.Linear(4, 1)
    return start(net, clip=1.0, optimizer=sgd, collate_fn=torch.stack, **sections)


def test_what_they_answer() -> None:
    engine = engine_of(gradient_accumulation_steps=2)
    assert engine.get_batch_info() == (4, 2, 2)
    assert engine.get_mom() == [0.5]
    assert engine.get_type() == [None]
    assert engine.zero_optimization_partition_gradients() is False
    engine.empty_partition_cache()
    loader = engine.deepspeed_io(list(torch.eye(4)), route="eval")
    assert isinstance(loader, DistributedLoader)
    # collated as initialize was told
    assert [batch.argmax(1).tolist() for batch in loader] == [[0, 1], [2, 3]]


def test_a_loader_is_read_again_and_again() -> None:
    class Loss(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).square().mean()

    torch.manual_seed(0)
    engine = engine_of(Loss(4, 1), train_batch_size=1)
    engine.set_dataloader([(torch.ones(1, 4),)])
    losses = [engine.train_batch().item() for _ in range(3)]
    assert losses[2] < losses[1] < losses[0]


def test_the_modules_own_names_come_first() -> None:
    net: Any = nn.Linear(4, 1)
    net.get_batch_info = lambda: "the model's"
    assert engine_of(net).get_batch_info() == "the model's"


def test_without_the_package_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ds_core.plugins.registry.discover", lambda: ())
    engine = engine_of()
    with pytest.raises(
        AttributeError,
        match="an attribute 'deepspeed_io': .* by dscore-deepspeed-compat.*pip install",
    ):
        _ = engine.deepspeed_io
    assert not hasattr(engine, "nobody_has_this")
