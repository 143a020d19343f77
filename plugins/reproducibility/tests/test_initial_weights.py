"""Initial weights by name: any order, any part of a model and any layout begin with the same bits."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import ds_tensor_parallel  # noqa: F401  - needs it installed
import pytest
import torch
from dropping_models import Net, pipeline
from ds_reproducibility import named_draws
from ds_testing import run_ranks
from ds_testing.truth import same, start, weights, whole_weights
from torch import Tensor, nn

from ds_core.errors import UsageError

ON = {"initialization": True, "dropout": False}


def reset(module: nn.Module) -> None:
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()


def drawn(model: nn.Module, init: Callable[[nn.Module], Any] = reset, seed: int = 1) -> Any:
    with named_draws(model, seed):
        model.apply(init)
    return weights(model)


def test_names_and_seed_alone_count() -> None:
    torch.manual_seed(1)
    wanted = drawn(Net(3))
    torch.manual_seed(2)
    part = Net(1)
    same(drawn(part), {name: wanted[name] for name in weights(part)})
    backwards = Net(3)
    with named_draws(backwards, 1):
        for module in reversed(list(backwards.modules())):
            reset(module)
    same(backwards, wanted)
    assert not torch.equal(drawn(Net(3), seed=2)["last.weight"], wanted["last.weight"])
    # The generator of torch was not used.
    torch.manual_seed(9)
    before = torch.get_rng_state()
    drawn(part)
    assert torch.equal(torch.get_rng_state(), before)


FILLS: dict[str, tuple[Callable[[Tensor], Any], float, float]] = {
    # what fills a weight of [400, 100], its standard deviation and its bound
    "reset_parameters": (lambda w: nn.init.kaiming_uniform_(w, a=math.sqrt(5)), 0.1 / 3**0.5, 0.1),
    "kaiming, relu": (
        lambda w: nn.init.kaiming_normal_(w, nonlinearity="relu"),
        0.2**0.5 / 10**0.5,
        9,
    ),
    "kaiming, fan_out": (
        lambda w: nn.init.kaiming_uniform_(w, mode="fan_out", nonlinearity="relu"),
        *((2 / 400) ** 0.5, (6 / 400) ** 0.5),
    ),
    "xavier": (nn.init.xavier_uniform_, (2 / 500) ** 0.5, (6 / 500) ** 0.5),
    "trunc_normal_": (lambda w: nn.init.trunc_normal_(w, std=0.02), 0.02, 2),
    "trunc_normal_, cut": (lambda w: nn.init.trunc_normal_(w, a=-1, b=1), 0.54, 1),
    "data.normal_": (lambda w: w.data.normal_(0, 0.02), 0.02, 9),
    "normal_": (lambda w: nn.init.normal_(w, 0.0, 0.5), 0.5, 9),
}


@pytest.mark.parametrize("name", FILLS)
def test_fills_have_torchs_distributions(name: str) -> None:
    fill, deviation, bound = FILLS[name]

    def init(module: nn.Module) -> None:
        fill(module.weight)  # type: ignore[arg-type]

    def layer() -> nn.Linear:
        return nn.Linear(100, 400, bias=False)

    found = drawn(layer(), init)["weight"]
    assert found.std().item() == pytest.approx(deviation, rel=0.03)
    assert abs(found.mean().item()) < 5 * deviation / 200
    assert found.abs().max() <= bound
    assert torch.equal(found, drawn(layer(), init)["weight"])
    # As torch has it.
    plain = layer()
    init(plain)
    assert plain.weight.std().item() == pytest.approx(deviation, rel=0.03)


def test_what_has_no_name_is_refused() -> None:
    with pytest.raises(UsageError, match="for no parameter or buffer of the model"):
        drawn(nn.Linear(3, 4), lambda module: nn.init.orthogonal_(module.weight))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="randperm is not offered"):
        drawn(nn.Linear(3, 4), lambda module: torch.randperm(3))


def test_a_key_draws_again_and_tells_what_it_leaves(caplog: pytest.LogCaptureFixture) -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))
            self.inner = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.inner(x) * self.scale
            return out

    wanted = drawn(Own(), seed=1234)
    with caplog.at_level(logging.WARNING, "ds_reproducibility"):
        engine = start(Own(), reproducibility=ON)
    assert "Own (of 1) have no reset_parameters" in caplog.text
    same(weights(engine.module), wanted)


def _sharded() -> Any:
    from ds_zero import GatheredParameters, Init

    with Init(remote_device=None):
        model = Net()
    said = ""
    try:
        start(model, reproducibility=ON, zero_optimization={"stage": 3})
    except UsageError as error:
        said = str(error)
    with GatheredParameters(list(model.parameters()), modifier_rank=0), named_draws(model, 1234):
        model.apply(reset)
    engine = start(model, zero_optimization={"stage": 3})
    found = whole_weights(engine)
    engine.destroy()
    return said, found


def _divided() -> Any:
    engine = start(Net(), reproducibility=ON, tensor_parallel={"autotp_size": 2})
    found = whole_weights(engine)
    engine.destroy()
    return found


def _staged() -> Any:
    # Layers that draw by torch's generator, which is another one on each rank.
    from ds_core import comm

    model = pipeline(2)
    torch.manual_seed(comm.rank() if comm.is_initialized() else 5)
    model.apply(reset)
    engine = start(model, reproducibility=ON)
    found = whole_weights(engine)
    engine.destroy()
    return found


def test_divided_layers_and_stages() -> None:
    wanted = drawn(Net(), seed=1234)
    same(run_ranks(2, _divided)[0], wanted)
    whole = drawn(pipeline(1), seed=1234)
    for stage in run_ranks(2, _staged):
        assert 0 < len(stage) < len(whole)
        same(stage, {name: whole[name] for name in stage})


@pytest.mark.slow
def test_weights_that_are_sharded_when_they_are_made() -> None:
    wanted = drawn(Net(), seed=1234)
    for said, found in run_ranks(2, _sharded):
        assert "is sharded already (ds_zero.Init)" in said
        same(found, wanted)
