"""`train_batch` and `eval_batch` bring batches to the device of the run, whatever they are nested
in.
"""

from __future__ import annotations

from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import ds_core
from ds_core.engine import Sequential


class Pair(NamedTuple):
    ids: Tensor
    more: dict[str, list[Tensor]]


class Seen(nn.Module):
    """Notes the devices of all tensors that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.devices: list[str] = []

    def forward(self, pair: Pair, text: str) -> Tensor:
        assert isinstance(pair, Pair) and text == "left as it is"
        self.devices += [x.device.type for x in (pair.ids, *pair.more["masks"])]
        return self.weight * 2.0


@pytest.mark.parametrize("whole", [True, False])
def test_tensors_in_containers_are_moved(whole: bool) -> None:
    model = Seen()
    engine = ds_core.initialize(
        model=model, config={"train_batch_size": 1, "optimizer": {"type": "SGD"}}
    )[0]
    batch: Any = (Pair(torch.ones(2), {"masks": [torch.ones(1), torch.ones(1)]}), "left as it is")
    # Stands for a device that is not the host's: every tensor of a batch must have come there.
    with mock.patch.object(
        engine.ctx.accelerator, "current_device", return_value=torch.device("meta")
    ):
        runner = Sequential()
        if whole:
            runner.train(engine, iter([batch]), 1)
        else:
            runner.evaluate(engine, iter([batch]), 1, return_logits=False)
    engine.destroy()
    assert model.devices == ["meta"] * 3
