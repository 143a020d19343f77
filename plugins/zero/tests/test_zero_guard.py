"""The guard under ZeRO: every rank is told which rank, module and parameter parted ways; honest
jobs are left alone.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ds_testing import RemoteError, run_ranks
from torch import Tensor, nn

D = 6


class Net(nn.Module):
    """On rank 1, one thing in the third pass is different."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.left, self.right, self.last = (nn.Linear(D, D) for _ in range(4))
        self.how = how
        self.passes = 0

    def forward(self, x: Tensor) -> Tensor:
        odd = self.passes == 2 and torch.distributed.get_rank() == 1
        self.passes += 1
        x = self.first(x)
        if not (odd and self.how == "skip"):
            x = self.right(x) if odd and self.how == "branch" else self.left(x)
        return self.last(self.right(x)).square().mean()


def guarded_losses(stage: int, how: str, guarded: bool) -> list[float]:
    import ds_core

    zero = {"stage": stage, "param_persistence_threshold": 0, "reduce_bucket_size": D * D + D}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "plugins": {"load": ["ds_zero.plugin"]},
        "comms_guard": {"enabled": guarded, "patience": 0.4},
        "zero_optimization": zero,
    }
    torch.manual_seed(0)
    engine, *_ = ds_core.initialize(model=Net(how), config=config)
    rank = torch.distributed.get_rank()
    losses = []
    for step in range(4):
        loss = engine(torch.ones(2, D) * (rank + 1))
        engine.backward(loss)
        # a collective of which the other rank knows nothing
        if step == 2 and rank == 1 and how == "norm":
            ds_core.comm.all_reduce(torch.ones(3))
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    if guarded:
        from ds_core.comm.interceptor import reset

        reset()
    return losses


@pytest.mark.fast_cases("3-skip-words0", "3-branch-words1")
@pytest.mark.parametrize(
    ("stage", "how", "words"),
    [
        (
            3,
            "skip",
            ["rank 0 came to the module of 'left.bias', and rank 1 to the module of 'right.bias'"],
        ),
        (3, "branch", ["rank 0 came to", "'left.bias'", "rank 1 to the module of 'right.bias'"]),
        (2, "norm", ["rank 1: all_reduce of 3 float32", "rank 0: ", "test_zero_guard.py:"]),
    ],
)
def test_all_ranks_are_told_who_parted_from_whom_and_where(
    stage: int, how: str, words: list[str]
) -> None:
    with pytest.raises(RemoteError) as info:
        run_ranks(2, guarded_losses, stage, how, True)
    failures = info.value.failures
    assert len(failures) == 2
    assert not any(failure.kind == "hung" for failure in failures)
    for failure in failures:
        told = str(failure)
        # Gradients and weights travel on groups of their own: ranks may also be found waiting on
        # different ones.
        apart = "in backward of module 'left'" in told and "to which rank 1 has not come" in told
        assert all(word in told for word in words) or (how == "skip" and apart), told


@pytest.mark.fast_cases("3")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_honest_job_trains_as_without_the_guard(stage: int) -> None:
    """In stages 1 and 2 ranks may run different modules."""
    how = "skip" if stage < 3 else "none"
    assert run_ranks(2, guarded_losses, stage, how, True) == run_ranks(
        2, guarded_losses, stage, how, False
    )
