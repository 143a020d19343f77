"""Optimizers of pytorch_optimizer, by name and with a stated grain."""

from __future__ import annotations

from typing import Any

import pytest
from ds_optimizer_adapter import measure_grain
from ds_optimizer_adapter.names import ELEMENTWISE
from ds_testing import OptimizerConformance, run_ranks

import ds_core
from ds_core.errors import ConfigError

LION = "pytorch_optimizer.Lion"
LAMB = "pytorch_optimizer.Lamb"


@pytest.mark.slow
class TestByName(OptimizerConformance):
    plugin = "ds_optimizer_adapter.plugin"
    params = {f"pytorch_optimizer.{name}": {"lr": 0.01} for name in ELEMENTWISE}
    # One without and one with a state that begins as the gradient.
    over_ranks = (LION, "pytorch_optimizer.ADOPT")


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_what_is_declared_is_what_is_measured(name: str) -> None:
    import pytorch_optimizer

    measured = measure_grain(getattr(pytorch_optimizer, name))
    assert measured.grain == "element", measured


def begin(optimizer: dict[str, Any], grain: str | None = None, **more: Any) -> Any:
    from torch import nn

    section = {"optimizer_adapter": {"grain": grain}} if grain is not None else {}
    config = {"train_batch_size": 4, "optimizer": optimizer, **section, **more}
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    return ds_core.initialize(model=model, config=config)[0]


@pytest.mark.parametrize(
    ("optimizer", "grain", "said"),
    [
        # An option that centres gradients over each tensor.
        ({"type": LION, "params": {"use_gc": True}}, None, "optimizer.params: grain 'element'"),
        ({"type": LAMB}, "element", "optimizer_adapter.grain: grain 'element' is stated"),
        ({"type": "AdamW"}, "model", "'AdamW' has declared"),
        ({"type": "torch.optim.NAdam"}, "tensor", "'torch.optim.NAdam' has declared"),
        ({"type": "pytorch_optimizer.Liom"}, "tensor", "no attribute 'Liom'"),
        ({"type": LION, "params": {"lr": "x"}}, None, "optimizer.params.lr: 'x'"),
        ({"type": LION, "params": {"rate": 1.0}}, None, "no parameter 'rate'"),
    ],
)
def test_a_grain_that_cannot_be_is_an_error(
    optimizer: dict[str, Any], grain: str | None, said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        begin(optimizer, grain)
    assert said in str(caught.value)


def test_a_stated_grain_is_the_run_s() -> None:
    engine = begin({"type": LION, "params": {"use_gc": True}}, "tensor")
    assert engine.ctx.grain == "tensor"
    engine.destroy()


def test_the_section_overrules_no_declared_optimizer_of_the_program() -> None:
    import torch

    model = torch.nn.Linear(4, 2)
    config = {"train_batch_size": 4, "optimizer_adapter": {"grain": "element"}}
    with pytest.raises(ConfigError, match="has declared 'matrix'"):
        ds_core.initialize(
            model=model, config=config, optimizer=torch.optim.Adafactor(model.parameters())
        )


def whole_tensors(own: bool) -> tuple[float, str]:
    """How far Lamb with its tensors on two ranks at stage 2 is from one process, and its grain."""
    import pytorch_optimizer
    import torch
    from ds_testing.truth import whole_weights
    from torch import nn

    def build() -> nn.Module:
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 3))

    params = {"lr": 0.02, "weight_decay": 0.1}
    config: dict[str, Any] = {
        "train_batch_size": 8,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 2},
        "optimizer_adapter": {"grain": "tensor"},
    }
    given = {}
    if own:
        given = {"optimizer": lambda groups: pytorch_optimizer.Lamb(groups, **params)}
    else:
        config["optimizer"] = {"type": LAMB, "params": params}
    engine, *_ = ds_core.initialize(model=build(), config=config, **given)
    model = build()
    optimizer = pytorch_optimizer.Lamb(model.parameters(), **params)
    for step in range(4):
        data = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        mine = data[engine.global_rank * 4 :][:4]
        engine.backward(engine(mine).square().mean())
        engine.step()
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()
    found = whole_weights(engine)
    off = max(
        float((found[name] - param.detach()).abs().max())
        for name, param in model.named_parameters()
    )
    grain = engine.ctx.grain
    engine.destroy()
    return off, str(grain)


@pytest.mark.parametrize("own", [False, True], ids=["by name", "of the program"])
def test_tensors_stay_whole_where_they_must(own: bool) -> None:
    for off, grain in run_ranks(2, whole_tensors, own):
        assert grain == "tensor"
        assert off < 1e-6


def cut() -> str:
    """What the config of Lamb on tensors that two ranks divide says."""
    layers = [{"patterns": ["0"], "partition_type": "column"}]
    parallel = {"autotp_size": 2, "partition_config": {"layer_specs": layers}}
    try:
        begin({"type": LAMB}, "tensor", tensor_parallel=parallel)
    except ConfigError as error:
        return str(error)
    return ""


def test_a_layout_that_cuts_tensors_is_refused() -> None:
    for said in run_ranks(2, cut):
        assert "needs each tensor whole" in said
