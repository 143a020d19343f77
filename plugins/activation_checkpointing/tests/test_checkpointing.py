"""``deepspeed.checkpointing``: settings, partitioned and contiguous activations, host copies,
times.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ds_activation_checkpointing as checkpointing
import pytest
import torch
from ds_activation_checkpointing.deepspeed.checkpointing import _Present, forget_settings
from ds_run_state.random_streams import STREAMS
from ds_testing import run_ranks
from torch import Tensor, nn

from ds_core.errors import ConfigError, UsageError


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    yield
    STREAMS.reset()
    forget_settings(_Present.settings)


class Unit:
    """A model-parallel unit of one rank, or of all."""

    def get_model_parallel_rank(self) -> int:
        return 3

    def get_model_parallel_group(self) -> Any:
        return torch.distributed.group.WORLD if torch.distributed.is_initialized() else None


def test_the_seeds_of_model_parallel_ranks() -> None:
    checkpointing.configure(Unit())
    checkpointing.model_parallel_cuda_manual_seed(10)
    tracker = checkpointing.get_cuda_rng_tracker()
    assert torch.initial_seed() == 10
    assert tracker.seeds_ == {10 + 2718 + 3}
    with tracker.fork():
        first = torch.rand(1)
    states = tracker.get_states()
    other = checkpointing.CudaRNGStatesTracker()
    other.add("model-parallel-rng", 10 + 2718 + 3)
    with other.fork("model-parallel-rng"):
        assert torch.equal(torch.rand(1), first)
    assert all(torch.equal(states[n], s) for n, s in other.get_states().items())


def test_configure(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert not checkpointing.is_configured()
    file = tmp_path / "ds_config.json"
    section = {"contiguous_memory_optimization": True, "partition_activations": True}
    file.write_text(json.dumps({"activation_checkpointing": section}))
    with pytest.raises(
        ConfigError, match="contiguous_memory_optimization needs number_checkpoints"
    ):
        checkpointing.configure(None, str(file))
    with pytest.raises(ConfigError, match=r"activation_checkpointing\.number_checkpoints.*0"):
        checkpointing.configure(None, num_checkpoints=0)
    assert not checkpointing.is_configured()
    checkpointing.configure(
        None, str(file), contiguous_checkpointing=False, profile=True, synchronize=True
    )
    assert checkpointing.is_configured()
    with caplog.at_level(logging.INFO, "ds_activation_checkpointing"):
        checkpointing.checkpoint(torch.exp, torch.ones(2, requires_grad=True)).sum().backward()
    assert [r.message.rpartition(":")[2].split()[0] for r in caplog.records] == [
        "forward",
        "recomputation",
    ]
    checkpointing.reset()


def partitioned(rows: int, **more: Any) -> list[float]:
    """The kept bytes of a forward, after it was shown that the gradients are those of plain
    autograd.
    """
    from ds_activation_checkpointing.inputs import Keeper
    from ds_activation_checkpointing.recompute import PLAIN, Region

    from ds_core import comm

    comm.init_distributed("gloo")
    torch.manual_seed(0)
    layers = [nn.Linear(7, 7) for _ in range(3)]
    mask = torch.ones(rows, 7)

    def run(call: Any) -> Tensor:
        x = torch.linspace(-1, 1, rows * 7).view(rows, 7).requires_grad_()
        out = x
        for layer in layers:
            out = call(lambda t, m, layer=layer: (layer(t) * m).tanh(), out, mask)
        out.square().sum().backward()
        assert x.grad is not None
        return x.grad

    wanted = run(lambda function, *args: function(*args))
    checkpointing.configure(Unit(), partition_activations=True, **more)
    try:
        for _ in range(3):
            assert torch.equal(run(checkpointing.checkpoint), wanted)
        x = torch.randn(rows, 7, requires_grad=True)
        keeper: Keeper = _Present.settings.keeper
        region = Region(torch.exp, (x.detach().fill_(1.0).requires_grad_(),), {}, PLAIN)
        kept = Region(
            torch.exp,
            (torch.ones(rows, 7, requires_grad=True),),
            {},
            _Present.settings.options("exp"),
        )
        assert keeper is kept.options.keeper
        return [region.kept_bytes(), kept.kept_bytes()]
    finally:
        forget_settings(_Present.settings)


@pytest.mark.parametrize("more", [{}, {"contiguous_checkpointing": True, "num_checkpoints": 4}])
def test_each_rank_keeps_a_part(more: dict[str, Any]) -> None:
    for rows in (8, 5):  # 56 elements divide by 2, 35 do not
        found = run_ranks(2, partitioned, rows) if not more else run_ranks(2, contiguous, rows)
        assert [whole for whole, _ in found] == [rows * 7 * 4] * 2
        assert [part for _, part in found] == [-(-rows * 7 // 2) * 4, rows * 7 // 2 * 4]


def contiguous(rows: int) -> list[float]:
    return partitioned(rows, contiguous_checkpointing=True, num_checkpoints=4)


def different() -> None:
    from ds_core import comm

    comm.init_distributed("gloo")
    checkpointing.configure(Unit(), partition_activations=True)
    x = torch.full((4,), float(comm.rank()), requires_grad=True)
    try:
        with pytest.raises(
            UsageError, match=r"inputs of .*exp \(shape \[4\]\) differ between the 2 ranks"
        ):
            checkpointing.checkpoint(torch.exp, x)
    finally:
        forget_settings(_Present.settings)


def test_activations_that_differ_are_not_divided() -> None:
    run_ranks(2, different)


def test_contiguous_memory_is_used_again_and_ends() -> None:
    from ds_activation_checkpointing.arena import Arena
    from ds_activation_checkpointing.inputs import Keeper
    from ds_activation_checkpointing.recompute import Options, recompute

    options = Options("block", Keeper(arena=Arena(2)))

    def block(x: Tensor) -> Tensor:
        return recompute(torch.exp, (x * 1,), {}, options)  # type: ignore[no-any-return]

    x = torch.ones(3, requires_grad=True)
    for _ in range(3):
        block(block(x)).sum().backward()
    assert x.grad is not None
    assert torch.allclose(x.grad, 3 * (torch.ones(3).exp() + 1).exp())
    waiting = [block(x), block(x)]
    with pytest.raises(
        UsageError, match=r"all 2 places for checkpoints are taken; set .*number_checkpoints"
    ):
        block(x)
    waiting.clear()
    with pytest.raises(UsageError, match="a checkpoint has 4 elements, the first one had 3"):
        block(torch.ones(4, requires_grad=True))
    options.keeper.reset()
    block(torch.ones(4, requires_grad=True)).sum().backward()


def test_host_copies_are_fetched_ahead_and_shared() -> None:
    from ds_activation_checkpointing.inputs import Keeper
    from ds_activation_checkpointing.recompute import Options, recompute

    done: list[str] = []

    class Copies:
        """Stands in for the asynchronous copies of a device: says what is asked of it."""

        def __init__(self) -> None:
            self.names: dict[int, str] = {}

        def out(self, tensor: Tensor) -> Any:
            name = "abcd"[len(self.names)]
            self.names[len(self.names)] = name
            done.append(f"out {name}")
            return name, tensor.clone()

        def prefetch(self, copy: Any) -> None:
            done.append(f"fetch {copy[0]}")

        def settle(self) -> None:
            pass

        def back(self, copy: Any) -> Tensor:
            done.append(f"back {copy[0]}")
            found: Tensor = copy[1]
            return found

    options = Options("block", Keeper(copies=Copies()))
    both = torch.ones(3, requires_grad=True) * 1
    mask = torch.ones(3)
    out = both
    for _ in range(2):
        out = recompute(lambda a, b, m: (a * b * m).exp(), (out, both, mask), {}, options)
    out.sum().backward()
    assert done == ["out a", "out b", "back b", "fetch a", "back a", "back a"]
