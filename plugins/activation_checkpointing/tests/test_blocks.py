"""Recomputation by config alone: the numbers of the run without it, with everything that a run may
have besides.
"""

from __future__ import annotations

import copy
import logging
import pickle
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from ds_testing import TransformConformance, run_ranks
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))
from block_models import Net, batch, config, losses_and_state, net  # noqa: E402
from ds_activation_checkpointing.meter import Meter  # noqa: E402

import ds_core  # noqa: E402
from ds_core.errors import UsageError  # noqa: E402

SECTIONS: dict[str, Any] = {
    "all": {"policy": "all"},
    "keep_matmuls": {"policy": "keep_matmuls"},
    "named": {"modules": ["blocks.[02]", "Linear"], "cpu_checkpointing": True},
    "budget": {"budget": 12_000},
}


class TestTransform(TransformConformance):
    plugin = "ds_activation_checkpointing.plugin"
    config: ClassVar[Any] = {"activation_checkpointing": {"modules": "auto"}}

    def make_model(self) -> nn.Module:
        return Net(2)

    def make_batch(self) -> Tensor:
        return batch(0, 0)


def equal(kind: str, world: int) -> None:
    """Stages 0 to 3, with bf16 and without: the same bits with recomputation as without."""
    for sections in (
        {},
        {"zero_optimization": {"stage": 1}},
        {"zero_optimization": {"stage": 2}, "gradient_accumulation_steps": 2},
        {
            "zero_optimization": {"stage": 3, "param_persistence_threshold": 0},
            "bf16": {"enabled": True},
        },
        {
            "torch_autocast": {"enabled": True, "dtype": "bfloat16"},
            "zero_optimization": {"stage": 3},
        },
    ):
        batches = (0, 1) if "gradient_accumulation_steps" in sections else (0,)
        wanted = losses_and_state(net(), config(**sections), 2, batches)
        got = losses_and_state(
            net(), config(**sections, activation_checkpointing=SECTIONS[kind]), 2, batches
        )
        for name, value in wanted.items():
            assert torch.equal(value, got[name]), f"{kind} {sections} {name}: {value - got[name]}"


@pytest.mark.fast_cases("named", "budget")
@pytest.mark.parametrize("kind", list(SECTIONS))
def test_the_numbers_are_those_without_recomputation(kind: str) -> None:
    run_ranks(2, equal, kind, 2)


def test_buffers_that_a_block_counts_in_are_counted_once() -> None:
    got = losses_and_state(net(), config(activation_checkpointing={"modules": "auto"}), 3)
    assert got["blocks.1.norm.num_batches_tracked"] == 3


def test_a_tensor_at_the_address_of_one_that_was_let_go_counts() -> None:
    meter = Meter(nn.Linear(4, 4))
    for _ in range(10):
        meter.saw(torch.ones(1000))
    assert sum(meter._storages.values()) == 10 * 4000
    twice = torch.ones(1000)
    meter.saw(twice)
    meter.saw(twice[:10])
    assert sum(meter._storages.values()) == 11 * 4000


def test_a_budget_chooses_blocks(caplog: pytest.LogCaptureFixture) -> None:
    from ds_activation_checkpointing.blocks import BLOCKS

    # 4 rows of fp32: the input, normalized, scaled; tanh, the mask of dropout, dropped out; and
    # rows of statistics.
    full = 4 * 4 * (3 * 16 + 3 * 32) + 4 * 2 * 16
    held = 4 * 4 * 16

    def chosen(budget: int) -> list[bool]:
        section = {"budget": budget}
        engine, *_ = ds_core.initialize(
            model=net(4), config=config(activation_checkpointing=section)
        )
        for step in range(2):
            engine.backward(engine(batch(step, 0)).square().mean())
            engine.step()
        blocks = engine.ctx.stash[BLOCKS]
        first = blocks[0].meter
        assert first is None
        engine.destroy()
        return [block.recomputes for block in blocks]

    with caplog.at_level(logging.INFO, "ds_activation_checkpointing"):
        assert chosen(0) == [True] * 4
        assert f"budget is 0 bytes, but {4 * held} is the least" in caplog.text
        assert chosen(10**6) == [False] * 4
        assert (
            f"0 of 4 blocks are computed again (); activations of blocks take {4 * full} bytes"
            in caplog.text
        )
        assert chosen(2 * held + 2 * full) == [True, True, False, False]
        assert chosen(2 * held + 2 * full - 1) == [True, True, True, False]


def test_copies_have_their_own_forward() -> None:
    engine, *_ = ds_core.initialize(
        model=net(), config=config(activation_checkpointing={"modules": "auto"})
    )
    for other in (copy.deepcopy(engine.module), pickle.loads(pickle.dumps(engine.module))):  # noqa: S301  our own bytes
        engine.eval(), other.eval()
        x = batch(0, 0)
        assert torch.equal(other(x), engine.module(x))
        with torch.no_grad():
            other.blocks[1].scale.zero_()
        assert not torch.equal(other(x), engine.module(x))
    engine.destroy()


class TestErrors:
    def start(self, model: nn.Module, **section: Any) -> None:
        engine, *_ = ds_core.initialize(
            model=model, config=config(activation_checkpointing=section)
        )
        engine.destroy()

    def test_modules_that_are_not_there(self) -> None:
        with pytest.raises(
            UsageError, match=r"modules: no module of the model is called 'Blok'.*'Block'"
        ):
            self.start(net(), modules=["Blok"])
        with pytest.raises(
            UsageError, match="Linear has no repeated block; name the modules by class"
        ):
            self.start(nn.Linear(5, 3), modules="auto")
