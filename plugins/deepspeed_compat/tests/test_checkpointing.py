"""``deepspeed.checkpointing``: the gradients of plain autograd, with random numbers that are replayed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from ds_deepspeed_compat import checkpointing
from ds_deepspeed_compat.missing import NotBuiltError
from torch import Tensor, nn
from torch.nn.functional import dropout


@pytest.fixture(autouse=True)
def fresh() -> Any:
    yield
    checkpointing.get_cuda_rng_tracker().reset()
    checkpointing._settings.clear()


@pytest.mark.parametrize("named", [False, True])
def test_gradients_are_those_of_plain_autograd(named: bool) -> None:
    layer = nn.Linear(6, 6)
    tracker = checkpointing.get_cuda_rng_tracker()

    def block(x: Tensor, scale: float) -> tuple[Tensor, float]:
        if named:
            with tracker.fork():
                return dropout(layer(x), 0.5) * scale, scale
        return dropout(layer(x), 0.5) * scale, scale

    def run(call: Any) -> tuple[Tensor, Tensor]:
        checkpointing.model_parallel_cuda_manual_seed(3)
        x = torch.linspace(-1, 1, 12).view(2, 6).requires_grad_()
        out, scale = call(block, x, 2.0)
        out, _ = call(block, out, scale)
        out.square().sum().backward()
        assert x.grad is not None
        return x.grad, torch.rand(1)

    wanted, drawn = run(lambda function, *args: function(*args))
    for call in (checkpointing.checkpoint, checkpointing.non_reentrant_checkpoint):
        grad, after = run(call)
        assert torch.equal(grad, wanted)
        assert torch.equal(after, drawn)


def test_named_states() -> None:
    tracker = checkpointing.CudaRNGStatesTracker()
    tracker.add("a", 1)
    for name, seed in (("b", 1), ("a", 2)):
        with pytest.raises(ValueError, match="is in use; choose another"):
            tracker.add(name, seed)
    torch.manual_seed(9)
    with tracker.fork("a"):
        first = torch.rand(1)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(1), first)
    saved = tracker.get_states()
    with tracker.fork("a"):
        second = torch.rand(1)
    tracker.set_states(saved)
    with tracker.fork("a"):
        assert torch.equal(torch.rand(1), second)
    with pytest.raises(ValueError, match="no random state 'b'"), tracker.fork("b"):
        pass


def test_the_seeds_of_model_parallel_ranks() -> None:
    class Unit:
        def get_model_parallel_rank(self) -> int:
            return 3

    checkpointing.configure(Unit())
    checkpointing.model_parallel_cuda_manual_seed(10)
    assert torch.initial_seed() == 10
    assert checkpointing.get_cuda_rng_tracker().seeds_ == {10 + 2718 + 3}


def test_configure(tmp_path: Path) -> None:
    assert not checkpointing.is_configured()
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps({"activation_checkpointing": {"partition_activations": True}}))
    with pytest.raises(NotBuiltError, match="activation_checkpointing: partition_activations: not built"):
        checkpointing.configure(None, str(file))
    with pytest.raises(NotBuiltError, match="cpu_checkpointing"):
        checkpointing.configure(None, checkpoint_in_cpu=True)
    checkpointing.configure(None, str(file), partition_activations=False, num_checkpoints=4)
    assert checkpointing.is_configured()
    checkpointing.reset()
