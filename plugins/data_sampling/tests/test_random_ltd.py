"""Layers that work on some of the tokens: as plain torch computes them, on every number of ranks,
and resumed.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import ds_activation_checkpointing  # noqa: F401  - these need them installed
import ds_checkpoint  # noqa: F401
import ds_pipeline  # noqa: F401
import ds_zero  # noqa: F401
import pytest
import torch
from ds_data_sampling.random_ltd import (
    convert_to_random_ltd,
    kept_length,
    kept_places,
    save_without_random_ltd,
)
from ds_testing import run_ranks
from ds_testing.truth import difference, plain, start, train, whole_weights
from torch import Tensor, nn

from ds_core.errors import ConfigError, PluginError, UsageError

SCHEDULE = {
    "min_value": 4,
    "max_value": 12,
    "schedule_config": {"require_steps": 6, "seq_per_step": 2},
}
LTD = {
    "enabled": True,
    "total_layer_num": 4,
    "random_ltd_layer_num": 2,
    "random_ltd_layer_id": [1, 2],
    "model_mask_name": "mask",
    "model_type": "decoder",
    "hidden_state_order": "batch_seq_dim",
    "random_ltd_schedule": SCHEDULE,
}
SMALL = {"reduce_bucket_size": 100, "param_persistence_threshold": 5}
GLOBAL = 8
SGD = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.5}}
LENGTH = 12
WIDTH = 6
STEPS = 8


def causal(length: int = LENGTH) -> Tensor:
    return torch.full((length, length), float("-inf"), dtype=torch.float64).triu(1)[None, None]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList([nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)])
        self.seen = 0

    def forward(
        self, x: Tensor, positions: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, None]:
        self.seen = x.shape[1]
        q, k, v = (self.inner[0](x) + positions[..., None]).chunk(3, dim=-1)
        out = nn.functional.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], mask)
        return x + self.inner[1](out[:, 0]), None


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(LENGTH, dtype=x.dtype).expand(len(x), -1) / LENGTH
        for layer in self.layers:
            x = layer(x, positions, mask=causal())[0]
        return x


def samples(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(GLOBAL, LENGTH, WIDTH, generator=generator, dtype=torch.float64)


def chosen(model: Any, given: tuple[int, Tensor]) -> Tensor:
    """The loss by plain torch: tokens chosen, and laid back, here."""
    step, x = given
    kept = min(4 + 8 * step // 6 // 2 * 2, 12)
    positions = torch.arange(LENGTH, dtype=x.dtype).expand(len(x), -1) / LENGTH
    for index, layer in enumerate(model.layers):
        if index in (1, 2) and kept < LENGTH:
            places = kept_places(1234, step, index, kept, LENGTH)
            new, _ = layer(x[:, places], positions[:, places], mask=causal(kept))
            x = x.clone()
            x[:, places] = new
        else:
            x, _ = layer(x, positions, mask=causal())
    return (x - 0.3).square().mean()


def routed(
    model: nn.Module | None = None, gas: int = 1, world: int = 1, ltd: Any = None, **config: Any
) -> Any:
    routing = {"enabled": True, "random_ltd": LTD if ltd is None else ltd}
    data = {"enabled": True, "data_routing": routing}
    model = Net().double() if model is None else model
    micro = GLOBAL // gas // world
    return start(model, micro=micro, gas=gas, optimizer=SGD, data_efficiency=data, **config)


def go(engine: Any, steps: range) -> list[float]:
    parts = engine.gradient_accumulation_steps() * engine.ctx.mesh.size("dp")
    return train(
        engine,
        lambda step, index: samples(step).chunk(parts)[index],
        steps,
        loss=lambda model, x: (model(x) - 0.3).square().mean(),
    )


def test_the_schedule_of_a_run_is_seen_from_its_engine() -> None:
    engine = routed()
    seen = engine.random_ltd_schedule()
    assert (seen.get_current_seq(), seen.get_random_ltd_layer_num()) == (4, 2)
    assert seen.get_total_layer_tokens(1) == GLOBAL * (2 * 4 + 2 * 12)
    engine.global_steps = 6
    assert seen.get_current_seq() == seen.state["current_value"] == 12
    assert seen.state_dict()["consumed_layer_tokens"] == seen.get_total_layer_tokens(6)
    engine.destroy()
    plain = routed(ltd={"enabled": False})
    assert plain.random_ltd_schedule() is None
    plain.destroy()


def through_a_checkpoint(stage: int, gas: int, folder: str, **config: Any) -> float:
    """The largest difference of losses and weights from plain torch, through a checkpoint in the
    middle.
    """
    from ds_core import comm

    if stage:
        config["zero_optimization"] = {"stage": stage, **SMALL}
    engine = routed(gas=gas, world=comm.world_size(), **config)
    losses = go(engine, range(STEPS // 2))
    engine.save_checkpoint(folder, tag="half")
    engine.destroy()
    engine = routed(gas=gas, world=comm.world_size(), **config)
    engine.load_checkpoint(folder, tag="half")
    losses += go(engine, range(STEPS // 2, STEPS))
    found = whole_weights(engine)
    engine.destroy()
    truth = Net().double()
    wanted = plain(truth, lambda step, _: (step, samples(step)), STEPS, optimizer=SGD, loss=chosen)
    return max(difference(losses, wanted), difference(found, truth))


@pytest.mark.parametrize("gas", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_one_rank_does_what_plain_torch_does(gas: int, tmp_path: Path) -> None:
    assert through_a_checkpoint(0, gas, str(tmp_path)) < 1e-10
    assert (
        through_a_checkpoint(0, gas, str(tmp_path), activation_checkpointing={"modules": "auto"})
        < 1e-10
    )


@pytest.mark.parametrize(
    ("world", "stage"),
    [(2, 3), *(pytest.param(w, s, marks=pytest.mark.slow) for w in (2, 4) for s in (0, 2))],
)
def test_ranks_keep_the_same_tokens(world: int, stage: int, tmp_path: Path) -> None:
    assert max(run_ranks(world, through_a_checkpoint, stage, 1, str(tmp_path))) < 1e-10


def test_the_length_grows_and_evaluation_sees_all() -> None:
    engine = routed()
    section = engine.config.section("data_efficiency").random_ltd
    assert [kept_length(section, step) for step in range(8)] == [4, 4, 6, 8, 8, 10, 12, 12]
    go(engine, range(1))
    assert [layer.seen for layer in engine.module.layers] == [12, 4, 4, 12]
    engine.eval()
    engine(samples(0))
    assert [layer.seen for layer in engine.module.layers] == [12] * 4


def test_places_differ_by_step_and_layer() -> None:
    found = {
        tuple(kept_places(1, step, layer, 5, 50).tolist())
        for step in range(4)
        for layer in range(4)
    }
    assert len(found) == 16 and all(list(p) == sorted(set(p)) for p in found)


def test_deepspeeds_names_leave_the_model_as_it_is() -> None:
    model = convert_to_random_ltd(Net().double(), Layer)
    names = set(save_without_random_ltd(model))
    engine = routed(model)
    assert set(engine.module.state_dict()) == names == set(Net().state_dict())
    go(engine, range(2))
    assert model.layers[1].seen == 4  # type: ignore[union-attr]
    twin = copy.deepcopy(model.layers[1])
    assert twin.forward.__self__ is twin  # type: ignore[union-attr]


def test_layers_of_transformers_drop_tokens() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
    }
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, vocab_size=32))
    engine = routed(model, ltd={**LTD, "model_mask_name": "attention_mask"})
    ids = torch.randint(0, 32, (8, 12))
    losses = []
    for _ in range(10):
        padding = torch.ones_like(ids)
        padding[0, 8:] = 0
        loss = engine(input_ids=ids, attention_mask=padding, labels=ids).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_a_wrong_number_of_layers_is_an_error() -> None:
    with pytest.raises(
        (UsageError, PluginError), match=r"total_layer_num is 5, but Net has 4 repeated layers"
    ):
        routed(ltd={**LTD, "total_layer_num": 5})
    with pytest.raises((UsageError, PluginError), match="has 8 Linear layers"):
        routed(convert_to_random_ltd(Net().double(), nn.Linear))


def test_a_mask_without_a_name_is_an_error() -> None:
    engine = routed(ltd={**LTD, "model_mask_name": None})
    with pytest.raises(UsageError, match=r"shape \(1, 1, 12, 12\).*model_mask_name"):
        engine(samples(0))


def test_what_does_not_go_together_is_an_error() -> None:
    from ds_core.setup.compose import compose

    routing = {"enabled": True, "random_ltd": LTD}
    config = {"train_batch_size": 1, "data_efficiency": {"enabled": True, "data_routing": routing}}
    with pytest.raises(ConfigError, match=r"random_ltd.enabled: does not go with pipelines"):
        compose({**config, "pipeline": {"stages": 2}})
    with pytest.raises(ConfigError, match=r"random_ltd.enabled: .* with sequence_parallel_size"):
        compose({**config, "sequence_parallel_size": 2})
    with pytest.raises(ConfigError, match=r"random_ltd.enabled: .* with sequence_parallel:"):
        compose({**config, "sequence_parallel": {"size": 2}})
    compose({**config, "sequence_parallel": {"size": 1}})
