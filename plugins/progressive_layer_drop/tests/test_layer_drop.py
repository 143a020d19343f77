"""Layers that are skipped: how many, the same on all ranks and after a resume, and as plain torch
computes them.
"""

from __future__ import annotations

import copy
import inspect
import math
from pathlib import Path
from typing import Any

import ds_activation_checkpointing  # noqa: F401  - these need them installed
import ds_checkpoint  # noqa: F401
import ds_pipeline  # noqa: F401
import ds_zero  # noqa: F401
import pytest
import torch
from ds_progressive_layer_drop.schedule import (
    ProgressiveLayerDrop,
    keep_probability,
    runs,
    theta_at,
)
from ds_testing import run_ranks
from ds_testing.truth import difference, plain, start, train, whole_weights
from torch import Tensor, nn

import ds_core
from ds_core.errors import ConfigError, UsageError
from ds_core.setup.compose import compose

PLD = {"enabled": True, "theta": 0.3, "gamma": 0.5}
SMALL = {"reduce_bucket_size": 100, "param_persistence_threshold": 5}
LAYERS = 4
GLOBAL = 8
SGD = {"type": "SGD", "params": {"lr": 0.2, "momentum": 0.5}}


class Layer(nn.Module):
    def __init__(self, width: int, pair: bool) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, width), nn.Tanh())
        self.pair = pair
        self.calls = 0

    def forward(self, hidden_states: Tensor, scale: float = 1.0) -> Any:
        self.calls += 1
        out = hidden_states + scale * self.inner(hidden_states)
        return (out, None) if self.pair else out


class Net(nn.Module):
    def __init__(self, pair: bool = False) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first = nn.Linear(5, 6)
        self.last = nn.Linear(6, 2)
        self.layers = nn.ModuleList(Layer(6, pair) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            out = layer(hidden_states=x, scale=0.5)
            x = out[0] if isinstance(out, tuple) else out
        out_: Tensor = self.last(x)
        return out_


def samples(step: int) -> Tensor:
    return torch.randn(
        GLOBAL, 5, generator=torch.Generator().manual_seed(step), dtype=torch.float64
    )


def dropped(model: Any, given: tuple[int, Tensor]) -> Tensor:
    """The loss by plain torch: the layers of each step chosen and rescaled here."""
    step, x = given
    theta = (1 - 0.3) * math.exp(-0.5 * step) + 0.3
    x = model.first(x)
    for index, layer in enumerate(model.layers):
        keep = 1 - (index + 1) / LAYERS * (1 - theta)
        if runs(1234, step, index, keep):
            x = x + 0.5 * layer.inner(x) / keep
    loss: Tensor = (model.last(x) - 0.3).square().mean()
    return loss


def dropping(
    model: nn.Module | None = None, gas: int = 1, world: int = 1, pld: Any = None, **config: Any
) -> Any:
    model = Net().double() if model is None else model
    pld = PLD if pld is None else pld
    micro = GLOBAL // gas // world
    return start(model, micro=micro, gas=gas, optimizer=SGD, progressive_layer_drop=pld, **config)


def go(engine: Any, steps: range) -> list[float]:
    parts = engine.gradient_accumulation_steps() * engine.ctx.mesh.size("dp")
    return train(
        engine,
        lambda step, index: samples(step).chunk(parts)[index],
        steps,
        loss=lambda model, x: (model(x) - 0.3).square().mean(),
    )


def through_a_checkpoint(stage: int, gas: int, folder: str, recompute: bool = False) -> float:
    """The largest difference of losses and weights from plain torch, through a checkpoint in the
    middle.
    """
    from ds_core import comm

    world = comm.world_size()
    config: dict[str, Any] = {"zero_optimization": {"stage": stage, **SMALL}} if stage else {}
    if recompute:
        config["activation_checkpointing"] = {"modules": "auto"}
    engine = dropping(gas=gas, world=world, **config)
    losses = go(engine, range(4))
    engine.save_checkpoint(folder, tag="half")
    engine.destroy()
    engine = dropping(gas=gas, world=world, **config)
    engine.load_checkpoint(folder, tag="half")
    losses += go(engine, range(4, 8))
    found = whole_weights(engine)
    engine.destroy()
    truth = Net().double()
    wanted = plain(truth, lambda step, _: (step, samples(step)), 8, optimizer=SGD, loss=dropped)
    return max(difference(losses, wanted), difference(found, truth))


@pytest.mark.parametrize("gas", [1, 4])
def test_one_rank_does_what_plain_torch_does(gas: int, tmp_path: Path) -> None:
    assert through_a_checkpoint(0, gas, str(tmp_path)) < 1e-10
    thetas = [theta_at(step, 0.3, 0.5) for step in range(8)]
    ran = [
        runs(1234, s, i, keep_probability(i, 4, theta))
        for s, theta in enumerate(thetas)
        for i in range(4)
    ]
    assert ran.count(False) > 6


@pytest.mark.fast_cases("2-0", "2-3")
@pytest.mark.parametrize(
    ("world", "stage"),
    [
        (2, 0),
        (2, 3),
        *(pytest.param(w, s, marks=pytest.mark.slow) for w in (2, 4) for s in (1, 2)),
        (4, 3),
    ],
)
def test_ranks_skip_the_same_layers(world: int, stage: int, tmp_path: Path) -> None:
    assert max(run_ranks(world, through_a_checkpoint, stage, 1, str(tmp_path))) < 1e-10


def test_recomputation_runs_what_forward_ran(tmp_path: Path) -> None:
    assert through_a_checkpoint(0, 2, str(tmp_path), True) < 1e-10


def test_the_schedule_is_the_documented_one() -> None:
    told = ProgressiveLayerDrop(theta=0.5, gamma=0.001)
    assert told.get_theta() == 1.0
    told.update_state(1000)
    assert told.get_state() == {
        "progressive_layer_drop": True,
        "pld_theta": 0.5 * math.exp(-1) + 0.5,
    }
    assert [keep_probability(i, 4, 0.5) for i in range(4)] == [0.875, 0.75, 0.625, 0.5]
    often = sum(runs(0, step, 3, 0.5) for step in range(4000)) / 4000
    assert often == pytest.approx(0.5, abs=0.04)


class Told(Net):
    def forward(
        self, x: Tensor, progressive_layer_drop: bool = False, pld_theta: float = 0.0
    ) -> Tensor:  # type: ignore[override]
        self.seen = (progressive_layer_drop, pld_theta)
        return super().forward(x)


def test_a_forward_that_asks_for_theta_is_told() -> None:
    model = Told().double()
    engine = dropping(model)
    go(engine, range(3))
    assert model.seen == (True, theta_at(2, 0.3, 0.5))
    assert sum(layer.calls for layer in model.layers) == 3 * LAYERS  # type: ignore[attr-defined, misc]
    assert engine.get_pld_theta() == theta_at(3, 0.3, 0.5)
    engine.eval()
    engine(samples(0))
    assert model.seen[0] is False


def test_outputs_keep_their_form_and_evaluation_runs_all() -> None:
    engine = dropping(
        Net(pair=True).double(), pld={"enabled": True, "theta": 0.01, "gamma": 100.0, "seed": 3}
    )
    layers: Any = engine.module.layers
    go(engine, range(6))
    assert sum(layer.calls for layer in layers) < 6 * LAYERS - 6
    before = [layer.calls for layer in layers]
    engine.eval()
    engine(samples(0))
    assert [layer.calls for layer in layers] == [n + 1 for n in before]


def test_a_run_that_begins_with_a_skipped_layer_learns_its_form(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = dropping(Net(pair=True).double())
    monkeypatch.setattr("ds_progressive_layer_drop.dropping.runs", lambda *_: False)
    engine.global_steps = 5
    engine.backward(engine(samples(0)).square().mean())
    assert [layer.calls for layer in engine.module.layers] == [1, 0, 0, 0]
    assert engine.module.first.weight.grad is not None


def test_signatures_and_copies_stay() -> None:
    engine = dropping()
    layer = engine.module.layers[0]
    assert list(inspect.signature(layer.forward).parameters) == ["hidden_states", "scale"]
    twin = copy.deepcopy(layer)
    assert twin.forward.__self__ is twin


def test_layers_of_transformers_are_skipped() -> None:
    transformers = pytest.importorskip("transformers")
    made = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=2,
        vocab_size=32,
    )
    torch.manual_seed(0)
    engine = dropping(
        transformers.LlamaForCausalLM(made), pld={"enabled": True, "theta": 0.2, "gamma": 1.0}
    )
    ids = torch.randint(0, 32, (8, 9))
    losses = []
    for _ in range(12):
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("pld", "words"),
    [
        ({**PLD, "theta": 0}, "theta"),
        ({**PLD, "apply_to": "forward"}, "takes no pld_theta"),
        ({**PLD, "layers": ["Lyer"]}, "did you mean"),
        ({**PLD, "layers": ["first"]}, "no repeated layers"),
    ],
)
def test_what_cannot_be_meant_is_an_error(pld: dict[str, Any], words: str) -> None:
    with pytest.raises((ConfigError, UsageError, ds_core.errors.PluginError), match=words):
        dropping(pld=pld)


def test_a_layer_of_another_shape_is_named() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(5, 6)), nn.Sequential(nn.Linear(6, 2))).double()
    engine = dropping(model)
    # at once, not when it is to be skipped
    with pytest.raises(UsageError, match="layer '0' cannot be skipped"):
        engine(samples(0))


def test_numbers_without_effect_are_named() -> None:
    notes = compose({"train_batch_size": 1, "progressive_layer_drop": {"enabled": True}}).notes
    assert any("no layer is skipped" in str(note) for note in notes)
    with pytest.raises(ConfigError, match="does not go with pipelines"):
        compose({"train_batch_size": 1, "progressive_layer_drop": PLD, "pipeline": {"stages": 2}})
