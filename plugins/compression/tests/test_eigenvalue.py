"""Eigenvalues of blocks: those of the whole Hessian on any number of ranks, and bits that follow
them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ds_checkpoint  # noqa: F401  - these need them installed
import ds_zero  # noqa: F401
import pytest
import torch
from ds_compression.eigenvalue.power_iteration import Eigenvalue, relative
from ds_compression.layers.layer import compressed_modules
from ds_testing import run_ranks
from torch import Tensor, nn

import ds_core
from ds_core import comm
from ds_core.errors import ConfigError, UsageError

BATCH = 8
WIDTH = 4
BLOCKS = 3


class Block(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows = x[:, None].expand(-1, 3, -1)
        seen = nn.functional.scaled_dot_product_attention(rows, self.mix(rows), rows)[:, 0]
        return x + self.scale * torch.tanh(self.mix(x)) + 0.1 * seen


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(Block(scale) for scale in (0.2, 1.0, 3.0))

    def forward(self, x: Tensor, loss: bool = True) -> Any:
        out = x
        for layer in self.layers:
            out = layer(out)
        return {"loss": (out - x.flip(1)).square().mean()} if loss else out


def batch(step: int) -> Tensor:
    return torch.randn(
        BATCH, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64
    )


def exact(model: Net, x: Tensor) -> list[float]:
    """Of each block, the eigenvalue of greatest size of the whole Hessian."""
    found = []
    for block in model.layers:
        params = list(block.parameters())
        (loss,) = model(x).values()
        grads = torch.autograd.grad(loss, params, create_graph=True)
        flat = torch.cat([g.flatten() for g in grads])
        rows = [
            torch.cat([r.flatten() for r in torch.autograd.grad(e, params, retain_graph=True)])
            for e in flat
        ]
        values = torch.linalg.eigvalsh(torch.stack(rows))
        found.append(float(values[values.abs().argmax()]))
    return found


def settings(stage: int = 0, gas: int = 1, **more: Any) -> dict[str, Any]:
    on = {
        "enabled": True,
        "tol": 1e-6,
        "max_iter": 1000,
        "layer_name": "layers",
        "layer_num": BLOCKS,
        "stability": 0.0,
    }
    return {
        "train_batch_size": BATCH,
        "gradient_accumulation_steps": gas,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.05}},
        "zero_optimization": {"stage": stage},
        "eigenvalue": on,
        **more,
    }


BITS = {
    "weight_quantization": {
        "shared_parameters": {"enabled": True, "schedule_offset": 1},
        "different_groups": {
            "all": {
                "params": {"start_bits": 8, "target_bits": 4, "quantization_period": 1},
                "modules": ["layers"],
            }
        },
    }
}


def found_by_an_engine(stage: int) -> list[tuple[list[float], list[float]]]:
    """Of two steps: the exact eigenvalues of the weights then, by all of the batch, and the
    engine's.
    """
    from ds_compression.eigenvalue.sensitivity import _SENSITIVITY

    model = Net().double()
    engine, *_ = ds_core.initialize(model=model, config=settings(stage))
    rows = []
    for step in range(2):
        truth = Net().double()
        truth.load_state_dict(model.state_dict())
        loss = engine(batch(step).chunk(comm.world_size())[comm.rank()])["loss"]
        rows.append((exact(truth, batch(step)), list(engine.ctx.stash[_SENSITIVITY].values)))
        engine.backward(loss)
        engine.step()
    engine.destroy()
    return rows


@pytest.mark.parametrize(
    ("world", "stage"),
    [
        (2, 1),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1, 0), (2, 0), (2, 2), (4, 0))),
    ],
)
def test_they_are_those_of_the_whole_hessian(world: int, stage: int) -> None:
    for rows in run_ranks(world, found_by_an_engine, stage):
        for truth, ours in rows:
            assert ours == pytest.approx(truth, rel=5e-3)


def bits_of(model: nn.Module) -> list[int]:
    return [c.quantiser.bits for _, c in compressed_modules(model) if c.quantiser is not None]


def steps_of(steps: range, folder: str, load: bool) -> tuple[list[list[int]], list[Tensor]]:
    """Bits of each block in `steps`, and the weights at the end."""
    from ds_compression.eigenvalue.sensitivity import _SENSITIVITY

    model = Net().double()
    config = settings(compression_training=BITS, gas=2)
    config["eigenvalue"]["tol"] = 0.01
    engine, *_ = ds_core.initialize(model=model, config=config)
    if load:
        engine.load_checkpoint(folder, tag="half")
    found = []
    for step in steps:
        for part in batch(step).chunk(comm.world_size())[comm.rank()].chunk(2):
            engine.backward(engine(part)["loss"])
            engine.step()
        found.append(bits_of(model))
        assert len(engine.ctx.stash[_SENSITIVITY].values) == BLOCKS
    if not load:
        engine.save_checkpoint(folder, tag="half")
    kept = [p.detach().clone() for p in model.parameters()]
    engine.destroy()
    return found, kept


@pytest.mark.slow
def test_sensitive_blocks_keep_their_bits_and_a_resumed_run_goes_on(tmp_path: Path) -> None:
    whole, truth = steps_of(range(12), str(tmp_path / "whole"), load=False)
    first, _ = steps_of(range(5), str(tmp_path), load=False)
    second, ours = steps_of(range(5, 12), str(tmp_path), load=True)
    assert first + second == whole
    for a, b in zip(ours, truth, strict=True):
        assert torch.equal(a, b)
    assert whole[0] == [0, 0, 0] and whole[1] == [8, 8, 8] and whole[2] == [7, 7, 7]
    assert whole[3][0] == 6 and whole[-1][0] == 4  # the least sensitive: a bit less in every step
    assert whole[6][2] == 7 and whole[7][2] == 6  # the most sensitive: five periods for each


def ranks_agree(folder: str) -> list[list[int]]:
    return steps_of(range(5), folder, load=False)[0]


def test_bits_are_the_same_on_all_ranks(tmp_path: Path) -> None:
    one, two = run_ranks(2, ranks_agree, str(tmp_path))
    assert one == two


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
def test_by_hand_it_is_deepspeeds_class() -> None:
    model = Net().double()
    model(batch(0))["loss"].backward(create_graph=True)
    truth = relative(exact(model, batch(0)))
    found = Eigenvalue(
        layer_name="layers", layer_num=3, tol=1e-6, max_iter=1000
    ).compute_eigenvalue(model)
    for index, block in enumerate(model.layers):
        for param in block.parameters():
            assert found[id(param)] == (pytest.approx(truth[index], rel=5e-3), index)
    assert relative([2.0, 0.0, -4.0]) == [0.5, 1.0, 1.0]


@pytest.mark.parametrize(
    ("more", "names"),
    [
        ({"zero_optimization": {"stage": 3}}, ["eigenvalue.enabled", "zero_optimization.stage"]),
        ({"eigenvalue": {"enabled": True}}, ["eigenvalue", "layer_num"]),
        ({"eigenvalue": {"enabled": True, "layer_num": 2}}, ["layer_name", "bert.encoder.layer"]),
        (
            {"eigenvalue": {"enabled": True, "layer_num": 9, "layer_name": "layers"}},
            ["layer_num", "has 3 modules"],
        ),
    ],
)
def test_what_cannot_be_is_refused(more: dict[str, Any], names: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        ds_core.initialize(model=Net().double(), config={**settings(), **more})
    for name in names:
        assert name in str(caught.value)


def test_a_model_without_a_loss_is_told() -> None:
    engine, *_ = ds_core.initialize(model=Net().double(), config=settings())
    with pytest.raises(UsageError, match="must return its loss"):
        engine(batch(0), False)
    engine.destroy()
