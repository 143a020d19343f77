"""Frozen bases in few bits, divided over ranks or on the host, and LoRA on top: the numbers of
plain torch.
"""

from __future__ import annotations

import copy
from typing import Any

import ds_checkpoint  # noqa: F401  - these need them installed
import ds_zero  # noqa: F401
import pytest
import torch
from ds_inference.weights.optimized_linear import (
    Init,
    LoRAConfig,
    LoRAOptimizedLinear,
    OptimizedLinear,
    QuantizationConfig,
    QuantizedLinear,
)
from ds_testing import RemoteError, run_ranks
from torch import Tensor, nn
from torch.nn import functional as F

import ds_core
from ds_core import comm

WIDTH = 8
HIDDEN = 13
RANK = 2
BATCH = 8


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.up_proj = nn.Linear(WIDTH, HIDDEN)
        self.down_proj = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(x + self.down_proj(torch.tanh(self.up_proj(x))))
        return out


def made(lora: dict[str, Any], quantised: bool) -> Net:
    """The net with LoRA in both projections; the matrices B are not zero, so that A has
    gradients."""
    config = LoRAConfig(lora_r=RANK, lora_alpha=3.0, **lora)
    with Init(config, QuantizationConfig(group_size=4) if quantised else None):
        model = Net().double()
    generator = torch.Generator().manual_seed(9)
    for layer in (model.up_proj, model.down_proj):
        assert isinstance(layer, LoRAOptimizedLinear)
        for part in (layer.lora_weight_1, layer.lora_weight_2):
            part.weight.data.copy_(torch.randn(part.weight.shape, generator=generator))  # type: ignore[union-attr]
    return model


class Truth(nn.Module):
    """Plain torch: bases as they are stored, and the two matrices of each."""

    def __init__(self, model: Net) -> None:
        super().__init__()
        self.bases = [layer.full_weight().clone() for layer in (model.up_proj, model.down_proj)]  # type: ignore[operator]
        self.bias = model.up_proj.bias.detach().clone()
        self.head = copy.deepcopy(model.head)
        parts = [
            p
            for layer in (model.up_proj, model.down_proj)
            for p in (layer.lora_weight_1, layer.lora_weight_2)
        ]
        self.parts = nn.ParameterList([nn.Parameter(p.weight.detach().clone()) for p in parts])

    def forward(self, x: Tensor) -> Tensor:
        a, b, c, d = self.parts
        scale = 3.0 / RANK
        inner = F.linear(x, self.bases[0] + scale * b @ a, self.bias)
        out: Tensor = self.head(x + F.linear(torch.tanh(inner), self.bases[1] + scale * d @ c))
        return out


def batch(step: int) -> Tensor:
    return torch.randn(
        BATCH, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64
    )


def trains(stage: int, quantised: bool, sharded: bool, offload: bool) -> tuple[float, float]:
    """After three steps: distance of the trained matrices, and of the loss, from plain torch."""
    from ds_testing.truth import whole_weights

    world = comm.world_size()
    model = made({"base_weight_sharding": world if sharded else 1, "offload": offload}, quantised)
    truth = Truth(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    assert len(trained) == 4
    config = {
        "train_batch_size": BATCH,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "param_persistence_threshold": 0},
        "optimizer": {"type": "SGD", "params": {"lr": 0.05}},
    }
    engine, *_ = ds_core.initialize(model=model, model_parameters=trained, config=config)
    optimizer = torch.optim.SGD(truth.parts, lr=0.05)
    far = 0.0
    for step in range(3):
        loss = engine(batch(step).chunk(world)[comm.rank()]).square().mean()
        engine.backward(loss)
        engine.step()
        optimizer.zero_grad()
        plain = truth(batch(step)).square().mean()
        plain.backward()
        optimizer.step()
        shared = comm.all_gather_json(loss.item()) if world > 1 else [loss.item()]
        far = max(far, abs(sum(shared) / world - plain.item()))
    found = {n: w for n, w in whole_weights(engine).items() if "lora_weight" in n}
    assert len(found) == 4
    error = max(
        float((a.double() - b).abs().max())
        for a, b in zip(found.values(), truth.parts, strict=True)
    )
    engine.destroy()
    return error, far


@pytest.mark.parametrize(
    ("world", "stage", "quantised", "sharded", "offload"),
    [
        (1, 0, True, False, False),
        (1, 0, False, False, True),
        (2, 0, True, True, False),
        (2, 1, False, True, True),
        (4, 0, True, True, True),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (2, 3, False, False, False),
                (2, 3, True, True, False),
                (2, 0, False, False, False),
            )
        ),
    ],
)
def test_it_trains_as_plain_torch(
    world: int, stage: int, quantised: bool, sharded: bool, offload: bool
) -> None:
    for error, far in run_ranks(world, trains, stage, quantised, sharded, offload):
        assert error < 1e-10 and far < 1e-10


def round_trip(quantised: bool, sharded: bool) -> None:
    """A state dict is whole on every rank, and a layer that is stored in another way takes it."""
    model = made({"base_weight_sharding": comm.world_size() if sharded else 1}, quantised)
    state = model.state_dict()
    other = made({}, quantised)
    other.up_proj.base._set(torch.zeros(HIDDEN, WIDTH, dtype=torch.float64))  # type: ignore[union-attr, operator]
    other.load_state_dict(state)
    assert torch.equal(other(batch(0)), model(batch(0)))
    model.load_state_dict(other.state_dict())
    assert torch.equal(other(batch(1)), model(batch(1)))
    del state["up_proj.base.q" if quantised else "up_proj.base.weight"]
    with pytest.raises(RuntimeError, match="Missing key.*up_proj.base"):
        model.load_state_dict(state)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("quantised", [False, True])
def test_state_dicts_are_whole(quantised: bool, sharded: bool) -> None:
    run_ranks(2, round_trip, quantised, sharded)


@pytest.mark.parametrize("quantised", [False, True])
def test_the_weights_of_ordinary_layers_are_loaded(quantised: bool) -> None:
    model = made({}, quantised)
    plain = Net().double()
    with torch.no_grad():
        for param in plain.parameters():
            param.mul_(2)
    missing, unexpected = model.load_state_dict(plain.state_dict(), strict=False)
    assert unexpected == [] and all("lora_weight" in name for name in missing)
    found = model.up_proj.full_weight()  # type: ignore[operator]
    assert float((found - plain.up_proj.weight).norm().detach()) < (0.1 if quantised else 1e-12)
    assert torch.equal(model.up_proj.bias, plain.up_proj.bias)


def test_numbers_are_close_and_few_bytes() -> None:
    torch.manual_seed(0)
    layer = OptimizedLinear(
        64, 32, quantization_config=QuantizationConfig(group_size=16), dtype=torch.float32
    )
    assert isinstance(layer, QuantizedLinear) and not list(layer.parameters())
    assert sum(b.nbytes for b in layer.buffers()) == 64 * 32 + 64 * 32 // 16 * 2
    torch.manual_seed(0)
    plain = OptimizedLinear(64, 32, dtype=torch.float32)
    assert type(plain) is nn.Linear
    x = torch.randn(5, 64, requires_grad=True)
    assert float(((layer(x) - plain(x)).norm() / plain(x).norm()).detach()) < 0.01
    layer.bfloat16()
    assert layer.base.scales.dtype == torch.float16
    assert layer(x.bfloat16()).dtype == torch.bfloat16


def test_the_whole_weight_is_not_kept_for_backward() -> None:
    layer = OptimizedLinear(
        64, 64, lora_config=LoRAConfig(2), quantization_config=QuantizationConfig()
    )
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.append(t.numel()) or t, lambda t: t
    ):
        layer(torch.randn(3, 64, dtype=torch.bfloat16, requires_grad=True)).sum().backward()
    assert max(kept) < 64 * 64


def test_init_changes_what_it_is_to_and_freezes_the_rest() -> None:
    with Init(LoRAConfig(lora_r=2, target_mods=["down_proj"])):
        model = Net()
    assert type(model.up_proj) is nn.Linear and isinstance(model.down_proj, LoRAOptimizedLinear)
    trained = sorted(n for n, p in model.named_parameters() if p.requires_grad)
    assert trained == ["down_proj.lora_weight_1.weight", "down_proj.lora_weight_2.weight"]
    assert type(Net().down_proj) is nn.Linear
    assert torch.equal(model(torch.ones(1, WIDTH)), Net()(torch.ones(1, WIDTH)))


def of_three_ranks() -> None:
    OptimizedLinear(4, 4, lora_config=LoRAConfig(2, base_weight_sharding=3))


def test_what_cannot_be_says_so() -> None:
    with pytest.raises(ValueError, match="q_bits 6"):
        QuantizationConfig(q_bits=6)
    with pytest.raises(ValueError, match="offload_ratio"):
        LoRAConfig(offload=True, offload_ratio=0.5)
    with pytest.raises(ValueError, match="expected a LoRAConfig, got dict"):
        OptimizedLinear(4, 4, lora_config={"lora_r": 2})  # type: ignore[arg-type]
    with pytest.raises(
        RemoteError, match="base_weight_sharding 3: it is 1 or the number of ranks, 2"
    ):
        run_ranks(2, of_three_ranks)
    layer = OptimizedLinear(
        4, 4, lora_config=LoRAConfig(2, delay_lora_init=True), dtype=torch.float32
    )
    with pytest.raises(RuntimeError, match="init_lora"):
        layer(torch.ones(1, 4))
