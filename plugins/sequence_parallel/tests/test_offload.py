"""Activations offloaded to the host and back through ``engine.backward``, on a device whose copies
run late.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ds_testing import run_ranks
from ds_testing.truth import start, whole_weights
from torch import Tensor, nn

LAYERS = 4
WIDTH = 8
ROWS = 16
STEPS = 2


class Block(nn.Module):
    """Saves its input and the output of relu."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(torch.relu(self.up(x)))
        return result


def losses_weights_moved(stage: int, offload: bool) -> Any:
    """Losses, weights, and the bytes that went to the host in each step."""
    from ds_sequence_parallel.tiles import offload as module
    from ds_state_stores.host_copies import HostCopies
    from ds_testing.kits.devices.late_device import LateDevice

    from ds_core import comm

    class Copies(HostCopies):
        """Treats tensors of the CPU as a device's."""

        def stays(self, tensor: Tensor) -> bool:
            return False

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(WIDTH, WIDTH), *(Block() for _ in range(LAYERS)), nn.Linear(WIDTH, 1)
    )
    copies = Copies(LateDevice(), pin_memory=False)
    if offload:
        saved = module.Offload(copies, min_bytes=1)
        module.stand_before(
            {m: module.OffloadedForward(m, saved) for m in model if isinstance(m, Block)}
        )
    engine = start(
        model,
        micro=1,
        clip=1.0,
        optimizer={"type": "AdamW", "params": {"lr": 0.01}},
        zero_optimization={"stage": stage, "stage3_param_persistence_threshold": 0},
    )
    losses = []
    moved = []
    for step in range(STEPS):
        x = torch.randn(
            ROWS, WIDTH, generator=torch.Generator().manual_seed(step + 10 * comm.rank())
        )
        loss = engine(x).square().mean()
        before, copies.moved = copies.moved, 0
        moved.append(before)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        del loss
    weights = {name: value.tolist() for name, value in whole_weights(engine).items()}
    engine.destroy()
    return losses, weights, moved


@pytest.mark.fast_cases("3")
@pytest.mark.parametrize("stage", [0, 3])
def test_the_same_bits(stage: int) -> None:
    plain, offloaded = (
        run_ranks(2, losses_weights_moved, stage, offload) for offload in (False, True)
    )
    for (losses, weights, _), (wanted, truth, _) in zip(offloaded, plain, strict=True):
        assert losses == wanted
        assert weights == truth
    for _, _, moved in offloaded:
        # each tensor once, no weight, all of them
        assert moved == [LAYERS * 3 * WIDTH * ROWS * 4] * STEPS
