"""What a `PipelineModule` is made of: every argument that shapes its layers."""

from __future__ import annotations

import base64
import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))

from ds_testing import run_ranks
from pipe_models import batch, pipeline
from pipe_steps import W, linears, mean, pipeline_engine, rows, squares, trains_like

from ds_core.errors import UsageError

# -- what a module is made of ----------------------------------------------------------------------


def takes_every_kind_of_layers() -> None:
    from ds_pipeline import LayerSpec, PipelineModule

    layers = linears(3)
    truth = copy.deepcopy(layers)
    net = nn.Sequential(layers[0], nn.ReLU(inplace=True), layers[1], nn.Tanh(), layers[2])
    engine = pipeline_engine(
        PipelineModule(net, num_stages=2, loss_fn=squares, partition_method="uniform")
    )
    trains_like(engine, [truth[0], torch.relu, truth[1], torch.tanh, truth[2]])
    engine.destroy()

    # Without loss_fn the last output is the loss; layers after a cut may work in place.
    layers = linears(2)
    truth = copy.deepcopy(layers)
    parts = [layers[0], nn.Sequential(nn.Flatten(1), nn.ReLU(inplace=True), layers[1]), mean]
    model = PipelineModule(parts, num_stages=2, partition_method="type:Linear|Sequential")
    assert model.partitions() == [0, 1, 3]
    assert model.changes_inputs(0) == model.is_last_stage()
    engine = pipeline_engine(model)
    trains_like(engine, [truth[0], torch.relu, truth[1], mean], None)
    engine.destroy()

    # Specs are built under their own seeds; a stage needs no weights, and none are optimized by
    # name.
    specs = [LayerSpec(nn.Linear, W, W), LayerSpec(nn.ReLU, inplace=True)]
    model = PipelineModule(
        specs, num_stages=2, loss_fn=squares, seed_layers=True, base_seed=3
    ).double()
    model.seed_layers = False
    torch.manual_seed(3)
    truth = [nn.Linear(W, W).double(), torch.relu]
    engine = pipeline_engine(
        model, model_parameters=[p for p in model.parameters() if p.requires_grad]
    )
    trains_like(engine, truth)
    engine.destroy()


def freezes() -> None:
    """The first stage learns nothing, then does: what is sent back changes with it."""
    from ds_pipeline import PipelineModule

    for schedule in ("1f1b", "zero_bubble"):
        layers = linears(4)
        for layer in layers[:2]:
            layer.requires_grad_(False)
        truth = copy.deepcopy(layers)
        model = PipelineModule(layers, num_stages=2, loss_fn=squares, partition_method="uniform")
        config = {"pipeline": {"schedule": schedule}}
        engine = pipeline_engine(model, **config, model_parameters=list(model.parameters()))
        trains_like(engine, truth)
        for layer in (*layers[:2], *truth[:2]):
            layer.requires_grad_(True)
        engine.reset_activation_shape()
        trains_like(engine, truth)
        engine.destroy()


class Told(nn.Linear):
    """Tells of seeds, and of how often it runs."""

    runs = 0

    def forward(self, x: Tensor) -> Tensor:
        Told.runs += 1
        return super().forward(x)


def recomputes() -> None:
    from ds_pipeline import PipelineModule
    from torch.utils.checkpoint import checkpoint

    called = []

    def through(function: Any, *inputs: Any) -> Any:
        called.append(len(inputs))
        return checkpoint(function, *inputs, use_reentrant=False)

    def model(**options: Any) -> Any:
        torch.manual_seed(5)
        layers = [kind(W, W).double() for kind in (Told, nn.Linear, Told, nn.Linear)]
        return PipelineModule(
            layers, num_stages=2, loss_fn=squares, partition_method="uniform", **options
        )

    truth = linears(4)
    cases: list[tuple[dict[str, Any], dict[str, Any], int, int]] = [
        ({}, {}, 2, 0),
        ({"activation_checkpoint_interval": 1}, {}, 4, 0),
        ({}, {"activation_checkpoint_interval": 2}, 4, 0),
        ({}, {"activation_checkpoint_interval": 2, "use_reentrant": False}, 4, 0),
        ({"activation_checkpoint_interval": 1, "activation_checkpoint_func": through}, {}, 4, 4),
        ({"activation_checkpoint_interval": 1, "checkpointable_layers": ["Linear"]}, {}, 2, 0),
        ({"activation_checkpoint_interval": 1, "checkpointable_layers": ["Told"]}, {}, 4, 0),
        ({"activation_checkpoint_interval": 2, "checkpointable_layers": ["Told"]}, {}, 2, 0),
    ]
    for options, section, runs, through_func in cases:
        called.clear()
        Told.runs = 0
        engine = pipeline_engine(model(**options), pipeline=section)
        copied = copy.deepcopy(truth)
        trains_like(engine, copied, steps=1)
        assert (Told.runs, len(called)) == (runs, through_func), (options, section)
        engine.destroy()


class Inside(nn.Module):
    """Recomputes by itself."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.layers = nn.Sequential(*linears(2))

    def forward(self, x: Tensor) -> Tensor:
        from torch.utils.checkpoint import checkpoint

        out: Tensor = checkpoint(self.layers, x, use_reentrant=self.reentrant and x.requires_grad)
        return out


def recomputes_inside() -> None:
    from ds_pipeline import PipelineModule

    for reentrant in (True, False):
        layers = [*linears(2), Inside(reentrant), *linears(1)]
        truth = copy.deepcopy(layers)
        model = PipelineModule(layers, num_stages=2, loss_fn=squares, partition_method="uniform")
        engine = pipeline_engine(model, pipeline={"schedule": "zero_bubble"})
        trains_like(engine, truth)
        engine.destroy()


def seeds() -> None:
    from ds_pipeline import LayerSpec, PipelineModule, TiedLayerSpec

    told: list[int] = []

    def seed_fn(seed: int) -> None:
        told.append(seed)
        torch.manual_seed(seed)

    layers = [
        LayerSpec(nn.Linear, W, W),
        LayerSpec(nn.Dropout, 0.5),
        TiedLayerSpec("t", nn.Linear, W, W),
    ]
    options: dict[str, Any] = {
        "loss_fn": squares,
        "seed_layers": True,
        "seed_fn": seed_fn,
        "base_seed": 50,
    }
    model = PipelineModule(layers, num_stages=2, partition_method="uniform", **options).double()
    mine = [0, 1] if model.is_first_stage() else [2]
    assert told == [50 + i for i in mine]
    told.clear()
    engine = pipeline_engine(model, gas=2)
    engine.train_batch(iter(rows(2)))
    assert told == [50 * micro + i for micro in (1, 2) for i in mine]
    engine.destroy()


def balances() -> None:
    """partition_method "profile" and its kin, with ties, functions and modules that remember what
    they saw.
    """
    import time

    from ds_pipeline import LayerSpec, PipelineModule, TiedLayerSpec

    class Slow(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            time.sleep(0.02)
            return super().forward(x)

    norm = nn.BatchNorm1d(W)
    before = copy.deepcopy(norm.state_dict())
    layers = [
        TiedLayerSpec("e", nn.Embedding, 11, W),
        lambda x: x.flatten(0, 1),
        norm,
        LayerSpec(nn.Linear, W, W),
        LayerSpec(Slow, W, W),
        TiedLayerSpec("e", nn.Embedding, 11, W, forward_fn=lambda m, x: x @ m.weight.t()),
    ]
    model = PipelineModule(
        layers, num_stages=2, partition_method="profile", example=torch.zeros(3, 4).long()
    )
    assert model.partitions() in ([0, 4, 6], [0, 5, 6])
    assert all(
        torch.equal(a, b) for a, b in zip(before.values(), norm.state_dict().values(), strict=True)
    )
    weights = PipelineModule(layers, num_stages=2, partition_method="Parameters").partitions()
    assert weights == [0, 4, 6]  # 66 + 12 + 42 | 42 + 66
    assert PipelineModule(
        layers, num_stages=2, partition_method="type:slow|linear"
    ).partitions() == [0, 4, 6]
    assert [model.stage_owner(i) for i in (0, 5)] == [0, 1]
    with pytest.raises(UsageError, match="no layer 6; the last is 5"):
        model.stage_owner(6)
    with pytest.raises(UsageError, match="has no weight 'scale'"):
        TiedLayerSpec("e", nn.Embedding, 2, 2, tied_weight_attr=["weight", "scale"]).build()


def test_layers_of_every_kind() -> None:
    run_ranks(2, takes_every_kind_of_layers)


def test_frozen_stages() -> None:
    run_ranks(2, freezes)


def test_recomputation_by_interval_and_by_class() -> None:
    run_ranks(2, recomputes)


def test_layers_that_recompute_by_themselves() -> None:
    run_ranks(2, recomputes_inside)


def test_seeds_are_as_documented() -> None:
    run_ranks(2, seeds)


def test_partition_methods() -> None:
    run_ranks(2, balances)


# -- replicas and ties without seeds ---------------------------------------------------------------


def starts_unseeded(zero: int) -> list[Any]:
    from ds_testing.truth import whole_weights

    from ds_core import comm

    torch.manual_seed(comm.rank())  # every process its own weights
    model = pipeline(2, seed_layers=False)
    engine = pipeline_engine(model, zero_optimization={"stage": zero, "reduce_bucket_size": 300})
    dp = engine.ctx.mesh.size("dp")
    index = engine.ctx.mesh.index("dp")
    first = whole_weights(engine)
    for step in range(2):
        engine.train_batch(iter([batch(step, m, index) for m in range(2)]))
    assert dp == 2
    answer = [first, whole_weights(engine)]
    engine.destroy()
    return answer


@pytest.mark.fast_cases("0")
@pytest.mark.parametrize("zero", [0, 3])
def test_replicas_and_ties_are_equal_from_the_start(zero: int) -> None:
    told = run_ranks(4, starts_unseeded, zero)
    for when in (0, 1):
        for a, b in ((0, 1), (2, 3)):  # replicas of a stage
            assert told[a][when].keys() == told[b][when].keys()
            assert all(torch.equal(told[a][when][n], told[b][when][n]) for n in told[a][when])
        tied = [t[when]["tied.embed.weight"] for t in told]
        assert all(torch.equal(tied[0], t) for t in tied)


@pytest.mark.parametrize(
    "given",
    [{"pipeline": {"stages": 1, "chunks": 1}}, {"pipeline.stages": 1, "pipeline.chunks": 1}],
)
def test_overrides_stand_in_place_of_arguments(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any]
) -> None:
    """A script with two stages and chunks runs in one process when the environment says so."""
    overrides = json.dumps(given).encode()
    monkeypatch.setenv("DS_CONFIG_OVERRIDES", base64.urlsafe_b64encode(overrides).decode())
    from ds_pipeline import PipelineModule

    model = PipelineModule([nn.Linear(2, 2) for _ in range(4)], num_stages=2, chunks=2)
    assert (model.num_stages, model.chunks, len(model.layers)) == (1, 1, 4)
