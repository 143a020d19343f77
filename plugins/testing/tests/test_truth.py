"""`ds_testing.truth`: training by the engine is training by plain torch, and what differs is named."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from ds_testing import truth
from torch import Tensor, nn

ADAM = {"type": "AdamW", "params": {"lr": 0.05, "weight_decay": 0.1}}


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()


def batch(step: int, index: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + index)
    return torch.randn(2, 4, dtype=torch.float64, generator=generator)


def trained(direct: bool) -> list[Any]:
    from ds_core import comm

    wanted = model()
    losses = truth.plain(wanted, batch, 4, count=2 * comm.world_size(), clip=0.1, optimizer=ADAM)
    engine = truth.start(model(comm.rank()), gas=2, clip=0.1, optimizer=ADAM)
    found = truth.train(engine, batch, 2, direct=direct)
    own = truth.train(engine, batch, [2, 3], direct=direct, mean=False)
    whole = truth.whole_weights(engine)
    engine.destroy()
    truth.same(found, losses[:2], 1e-12)
    truth.same(whole, wanted, 1e-12)
    return [own, losses[2:]]


@pytest.mark.parametrize("direct", [False, True])
def test_the_engine_trains_as_plain_torch_does(ranks: Any, direct: bool) -> None:
    answers = ranks(2, trained, direct)
    means = [sum(step) / 2 for step in zip(*(own for own, _ in answers), strict=True)]
    truth.same(means, answers[0][1], 1e-12)


@pytest.mark.parametrize(
    "given", [{"input": torch.ones(2, 4)}, (torch.ones(2, 4),), torch.ones(2, 4)]
)
def test_batches_are_mappings_tuples_or_one_argument(given: Any) -> None:
    net = nn.Linear(4, 2)
    assert torch.equal(truth.loss_of(net, given), net(torch.ones(2, 4)).square().mean())


def test_what_differs_is_named() -> None:
    found = {"a": torch.ones(2), "b": torch.tensor([1.0, 2.0])}
    wanted = {"a": torch.ones(2), "b": torch.tensor([1.0, 2.5], dtype=torch.float64)}
    with pytest.raises(AssertionError, match=r"(?s)difference: 0.5 at index \(1,\).*item \['b'\]"):
        truth.same(found, wanted, 0.1)
    truth.same(found, wanted, 0.5)
    assert truth.difference(found, wanted) == 0.5
    assert math.isnan(truth.difference([1.0, math.nan], [1.0, 2.0]))
    with pytest.raises(AssertionError, match="names differ: {'b'}"):
        truth.difference({"a": 1.0}, {"a": 1.0, "b": 1.0})
    with pytest.raises(AssertionError):
        truth.same(model(0), model(1), 1e-3)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral"])
def test_tiny_models(kind: str) -> None:
    pytest.importorskip("transformers")
    one, other = (truth.tiny(kind, experts="eager") for _ in range(2))
    truth.same(one, other)
    assert sum(p.numel() for p in one.parameters()) < 50_000
    assert truth.tiny(kind, hidden_size=12).config.hidden_size == 12
