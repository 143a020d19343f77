"""CUDA graphs of a module's forward, with a stand-in for the device's graphs; and on a GPU where
there is one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ds_inference.run.graphs import Graphs
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))

from inference_models import ids, make

from ds_core.errors import UsageError

CPU = torch.device("cpu")


class Stand:
    """Records as a device does: work is not run while it is recorded, and each replay writes into
    the same memory.
    """

    def __init__(self) -> None:
        self.recorded = 0

    def __call__(
        self, device: torch.device, work: Callable[[], Any]
    ) -> tuple[Callable[[], None], Any]:
        self.recorded += 1
        returned = work()
        tensors = [x for x in returned.values() if isinstance(x, Tensor)]
        for x in tensors:
            x.zero_()

        def replay() -> None:
            for x, new in zip(
                tensors, (y for y in work().values() if isinstance(y, Tensor)), strict=True
            ):
                x.copy_(new)

        return replay, returned


def follow(model: nn.Module, graphs: Graphs, device: str = "cpu") -> None:
    """Calls of two shapes, in turn, with and without a mask, equal the module; results stay as they
    were.
    """
    first = kept = None
    for seed, size in ((1, 5), (2, 3), (3, 5), (4, 3), (5, 5)):
        torch.manual_seed(seed)
        tokens = torch.randint(0, 20, (2, size), device=device)
        with torch.no_grad():
            got = graphs(input_ids=tokens, return_dict=True)
            wanted = model(input_ids=tokens, use_cache=False)
        assert type(got) is type(wanted)
        assert torch.allclose(got.logits, wanted.logits, atol=1e-5)
        if first is None:
            first = got.logits
            kept = got.logits.clone()
    assert first is not None and kept is not None
    assert torch.equal(first, kept)


def test_graphs_equal_the_module() -> None:
    stand = Stand()
    model = make("llama")
    graphs = Graphs(model, CPU, stand)
    follow(model, graphs)
    assert stand.recorded == 2, "one for each shape"
    with torch.no_grad():
        cache = graphs(input_ids=ids(), use_cache=True).past_key_values
        assert cache is not None
        assert cache.get_seq_length() == ids().shape[1]
    assert stand.recorded == 2, "a call with a cache is the module's own"


def test_what_cannot_be_recorded_is_an_error() -> None:
    class Odd(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return {1, 2}

    with pytest.raises(UsageError, match="the module returns a set, which cannot be copied"):
        Graphs(Odd(), CPU, Stand())(torch.ones(1))

    def refuse(device: torch.device, work: Callable[[], Any]) -> Any:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nmore")

    with pytest.raises(
        UsageError,
        match=r"Linear cannot be recorded \(CUDA error: operation not permitted when stream is",
    ):
        Graphs(nn.Linear(2, 2), CPU, refuse)(torch.ones(1, 2))


@pytest.mark.gpu
def test_graphs_on_the_gpu() -> None:
    model = make("llama").cuda()
    follow(model, Graphs(model, torch.device("cuda", 0)), "cuda")
